import json
import re
import shutil

import numpy as np
import pytest

from data_pipeline import manifest
from data_pipeline.dataset import TokenData
from tfbig.data import main


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


@pytest.fixture
def folder(data_folder, tmp_path):
    return shutil.copytree(data_folder, tmp_path / "copy")


def test_inspect_shows_what_the_step_trains_on(capsys, data_folder):
    code, out, _ = run(
        capsys,
        "inspect",
        f"--data={data_folder}",
        "--step=3",
        "--global_batch=5",
        "--seed=7",
        "--samples=0",
        "--characters=0",
    )
    assert code == 0 and "samples 10 to 14" in out
    data = TokenData.open(data_folder)
    batch = data.rows("train", np.arange(10, 15), 7)
    for row in range(5):
        assert data.tokenizer.decode(batch["tokens"][row]) in out
        assert f"--- sample {10 + row}, {data.sources[batch['source_index'][row]]}" in out


def test_verify_finds_every_flipped_bit(capsys, folder):
    code, out, _ = run(capsys, "verify", f"--data={folder}")
    assert code == 0 and "all of it is intact" in out
    digest = manifest.corpus_sha256(TokenData.open(folder).contents)
    assert f"corpus sha256 {digest}" in out.splitlines()
    path = sorted(folder.glob("*-train.tfrecord-*"))[1]
    data = bytearray(path.read_bytes())
    stride = TokenData.open(folder).contents["stride"]
    data[2 * stride + 40] ^= 1
    path.write_bytes(bytes(data))
    code, out, err = run(capsys, "verify", f"--data={folder}")
    assert code == 1 and f"{path} is damaged: the first damaged row is 2" in err
    assert "1 problems" in out or "2 problems" in out


def test_verify_reads_kept_token_stores(capsys, folder):
    (store,) = TokenData.open(folder).contents["stores"]
    place = folder / "tokens" / store["folder"]
    originals = {path: path.read_bytes() for path in place.iterdir()}

    def problems():
        code, _, err = run(capsys, "verify", f"--data={folder}")
        for path, data in originals.items():
            path.write_bytes(data)
        assert code == 1 and err.count("\n") == 1 and str(place) in err
        return err

    data = bytearray(originals[place / "tokens.bin"])
    data[-7] ^= 1
    (place / "tokens.bin").write_bytes(data)
    assert "is damaged; its sha256 is not the manifest's" in problems()
    (place / "tokens.bin").write_bytes(data[:-2])
    assert "it is cut or changed" in problems()
    (place / "tokens.keys").write_bytes(originals[place / "tokens.keys"][:-8])
    assert "does not have a key" in problems()
    (place / "tokens.checks").unlink()
    assert "cannot be read" in problems()
    lengths = np.frombuffer(originals[place / "tokens.idx"], "<i4", 90, 34).copy()
    lengths[3:5] += np.array([1, -1], np.int32)
    index = bytearray(originals[place / "tokens.idx"])
    index[34 : 34 + lengths.nbytes] = lengths.tobytes()
    (place / "tokens.idx").write_bytes(index)
    assert "do not end with end-of-text" in problems()
    code, out, _ = run(capsys, "verify", f"--data={folder}")
    assert code == 0 and "tokens/00000: 90 documents" in out


def test_report_is_one_page_with_every_source(capsys, folder):
    pytest.importorskip("plotly")
    code, out, _ = run(capsys, "report", f"--data={folder}")
    page = (folder / "report.html").read_text()
    assert code == 0 and "report.html is written" in out
    assert not re.search(r"<(script|link)[^>]+(src|href)=", page)  # it needs no network
    for text in ("Pile-CC", "Github", "bytes per token", "plot-2", "<td>90</td>"):
        assert text in page


def test_mixture_is_shown_and_changed(capsys, folder):
    code, out, _ = run(capsys, "mixture", f"--data={folder}")
    assert code == 0 and out.count("weight 1") == 2
    code, out, _ = run(
        capsys, "mixture", f"--data={folder}", "--weights=Github=0", "--first_sample=10"
    )
    assert code == 0 and "from sample 10:" in out and "weight 0          0.00%" in out
    assert "whether one has consumed sample 10 already was not checked" in out


def test_export_says_what_it_wrote(capsys, folder, tmp_path):
    code, out, _ = run(capsys, "export", f"--data={folder}", f"--to={tmp_path}/a/b")
    assert code == 0 and (tmp_path / "a/b.idx").exists() and "documents" in out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "say what to do: tfbig data inspect|verify"),
        (["verfy"], "Did you mean verify?"),
        (["verify"], "--data is missing"),
        (["verify", "--data=none"], "there is no data folder none"),
        (["inspect", "--data=DATA"], "--step=0 must be at least 1: it counts from 1"),
        (["inspect", "--data=DATA", "--step=1", "--samples=-1"], "0 shows all of the step"),
        (["inspect", "--data=DATA", "--step=1", "--characters=-5"], "0 shows all of a sample"),
        (["inspect", "--data=DATA", "--step=1", "--global_batch=0"], "must be at least 1"),
        (["inspect", "--data=DATA", "--step=1", "--seed=-1"], "must lie between 0 and"),
        (["inspect", "--data=DATA", f"--step={2**62}"], "lies beyond sample"),
        (["export", "--data=DATA"], "--to is missing"),
        (["export", "--data=DATA", "--to=x", "--split=dev"], "has no dev split"),
        (["export", "--data=DATA", "--to=gs://bucket/x"], "written to file systems only"),
        (["export", "--data=DATA", "--to=DATA/manifest.json/x"], "cannot write --to="),
        (["report", "--data=DATA", "--to=DATA"], "Is a directory; name another place"),
        (["report", "--data=DATA", "--to=DATA/none/x.html"], "No such file or directory; name"),
        (["mixture", "--data=DATA", "--weights=Github=2"], "name the --run"),
        (["mixture", "--data=DATA", "--weights=A=2", "--first_sample=-7"], "must lie between 0"),
        (["mixture", "--data=DATA", "--first_sample=5"], "give --weights or --add too"),
        (["mixture", "--data=DATA", "--weights=,", "--first_sample=5"], "names no source"),
        (["mixture", "--run=none"], "--run=none is not a folder"),
    ],
)
def test_a_mistake_is_one_line(capsys, data_folder, arguments, problem):
    arguments = [word.replace("DATA", str(data_folder)) for word in arguments]
    code, _, err = run(capsys, *arguments)
    assert code == 2 and problem in err and err.count("\n") == 1


@pytest.mark.parametrize("name", ["splits", "sources", "features", "statistics", "token_store"])
def test_a_manifest_that_lacks_something_is_named(capsys, folder, name):
    path = folder / "manifest.json"
    contents = json.loads(path.read_text())
    del contents[name]
    path.write_text(json.dumps(contents))
    for action in ("verify", "report", "mixture"):
        code, _, err = run(capsys, action, f"--data={folder}")
        assert code == 2 and f"manifest.json lacks {name}" in err and err.count("\n") == 1
