"""A Hugging Face folder to a repository on the Hub. TensorFlow-free."""

import re
from collections.abc import Iterator
from pathlib import Path

from tfbig.errors import UserError

_ABOUT_THE_HUB = ("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "requests")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def files_to_upload(folder: Path) -> list[tuple[str, int]]:
    """Returns (name, bytes) of what would be uploaded, sorted.

    Raises:
      UserError: it is no exported folder.
    """
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder} is not an exported Hugging Face folder: it has no config.json; name another "
            "--output."
        )
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [(str(path.relative_to(folder)), path.stat().st_size) for path in files]


def check_repository(name: str) -> None:
    """Raises UserError unless `name` is OWNER/MODEL."""
    if not _REPOSITORY.fullmatch(name):
        raise UserError(f"--push={name}: a repository is named OWNER/MODEL; give both.")


def push(folder: Path, repository: str, private: bool, dry_run: bool) -> Iterator[str]:
    """Uploads a folder, or says what would be uploaded; yields lines to print.

    The token is the Hub library's: HF_TOKEN, or what `hf auth login` stored.

    Args:
      folder: an export.
      repository: OWNER/MODEL; made when there is none.
      private: whether it is made private.
      dry_run: nothing is sent.

    Raises:
      UserError: the Hub refuses, or is not reached.
    """
    check_repository(repository)
    files = files_to_upload(folder)
    total = sum(size for _, size in files)
    if dry_run:
        yield f"would upload {len(files)} files, {total:,} bytes, to {repository}: --nodry_run does"
        for name, size in files:
            yield f"  {name}  {size:,}"
        return
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Exported by tfbig"
        )
    except Exception as error:  # the library's, or of the HTTP client that its version has
        if type(error).__module__.partition(".")[0] not in _ABOUT_THE_HUB:
            raise
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"--push={repository}: {why}") from error
    yield f"uploaded {len(files)} files, {total:,} bytes: {commit.commit_url}"
