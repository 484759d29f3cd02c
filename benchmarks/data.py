"""Preparation and feeding beside their raw limits: `python -m benchmarks.data [--quick]`.

usage: python -m benchmarks.data [--quick] [--text=FOLDER,...] [--work=FOLDER]

FOLDER holds real text (.txt, .rst, .html, .md, .py, also .gz), 200 MB and more, such as Debian's
packages linux-doc, python3-doc and other -doc packages unpacked (`apt-get download`, `dpkg-deb
-x`); without it, the sources of Python's library and packages. It is stripped of tags and cut into
pages of about 4 KiB. Rates are megabytes of text per second of CPU (user and system) of one pinned
process; raw rates and whole preparations take turns, and medians count. A bar is a line `name | bar
| measured | yes`; --quick shows that all of it works, on too little text to judge rates by.
"""

import argparse
import io
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data_text import installed_text, make_corpus, make_tokenizer

PILE_BYTES = 1254 * 2**30  # of text, as released
DOLLARS_PER_CORE_HOUR = 0.045  # about an on-demand vCPU of a c7i/m7i instance, us-east-1, 2026
SEQUENCE_LENGTH, BATCH = 2048, 64
MEGABYTE = 1e6
Medians = dict[str, float]


def cpu_rate(work: Callable[[], Any], num_bytes: float) -> float:
    """Returns megabytes per CPU second of this process."""
    start = time.process_time()
    work()
    return num_bytes / MEGABYTE / (time.process_time() - start)


def raw_rates(file: Path, before: Path, tokenizer: Any) -> Medians:
    """Returns the rates of each stage's core operations alone, on one file.

    Args:
      file: is measured.
      before: what the encoder has met by then, as in the middle of a corpus.
      tokenizer: of the encoder.
    """
    import orjson

    from data_pipeline.codecs import ByteReader, decompress, split_lines
    from data_pipeline.encoders import TokenEncoder
    from data_pipeline.shards import masked_crc32c

    def read(path: Path = file) -> list[bytes]:
        return list(split_lines(decompress(iter(ByteReader(str(path))), ".zst", "")))

    encoder = TokenEncoder(tokenizer, "gigatoken")
    encoder.encode([orjson.loads(line)["text"] for line in read(before)])
    lines = read()
    size = sum(map(len, lines))
    texts = [orjson.loads(line)["text"] for line in lines]
    data = [text.encode() for text in texts]
    text_size = sum(map(len, data))
    rows = [b"x" * 4098] * 4000
    return {
        "zstd and lines": cpu_rate(read, size),
        "json": cpu_rate(lambda: [orjson.loads(line) for line in lines], size),
        "UTF-8": cpu_rate(lambda: [text.encode() for text in texts], text_size),
        "sha256": cpu_rate(lambda: [sha256(item).digest() for item in data], text_size),
        "gigatoken": cpu_rate(lambda: encoder.encode(texts, 1, data), text_size),
        "crc32c by row": cpu_rate(lambda: masked_crc32c(rows), sum(map(len, rows))),
    }


def megatrons_way(file: Path, tokenizer: Any, megabytes: float) -> float:
    """Returns the rate of the tokenizers library, one json line at a time.

    As tools/preprocess_data.py of Megatron-LM works within each of its processes.
    """
    import zstandard

    size = 0
    start = time.process_time()
    with open(file, "rb") as opened, open(os.devnull, "wb") as output:
        for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(opened)):
            text = json.loads(line)["text"]
            output.write(np.array(tokenizer.encode(text).ids, np.uint16).tobytes())
            size += len(text.encode())
            if size > megabytes * MEGABYTE:
                break
    return size / MEGABYTE / (time.process_time() - start)


def end_to_end(files: str, tokenizer: Path, folder: Path, encoder: str) -> Medians:
    """Prepares a folder with one process and verifies it; returns MB and seconds of each stage."""
    from data_pipeline.preparation import prepare
    from data_pipeline.verifying import find_problems
    from tfbig.config import PrepareConfig

    shutil.rmtree(folder, ignore_errors=True)
    said: list[str] = []
    config = PrepareConfig(
        data=str(folder),
        source=files,
        tokenizer=str(tokenizer),
        sequence_length=SEQUENCE_LENGTH,
        validation_fraction=0.01,
        encoder=encoder,  # type: ignore[arg-type]
        workers=1,
    )
    start = time.process_time()
    prepare(config, said.append)
    prepared = time.process_time()
    problems = list(find_problems(folder, lambda text: None))
    verified = time.process_time()
    assert not problems, problems
    contents = json.loads((folder / "manifest.json").read_text())
    entries = [entry for split in contents["statistics"].values() for entry in split.values()]
    size = sum(entry["bytes"] for entry in entries) / MEGABYTE
    line = next(text for text in said if "seconds (of CPU)" in text)
    stages = {name: float(value) for name, value in re.findall(r"(\w+) [\d.]+ \(([\d.]+)\)", line)}
    stages["verify"] = verified - prepared
    documents = sum(entry["documents"] for entry in entries)
    return {"size": size, "documents": documents, "rate": size / (verified - start), **stages}


def feeding(folder: Path, batch: int, min_steps: int) -> dict[str, Any]:
    """Returns what benchmarks/data_feeding.py measures."""
    command = [sys.executable, "-m", "benchmarks.data_feeding", str(folder), str(batch)]
    root = str(Path(__file__).resolve().parents[1])
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(min_steps)], env=environment, capture_output=True, text=True, timeout=900
    )
    if done.returncode:
        sys.exit(f"feeding failed:\n{done.stderr[-2000:]}")
    line = next(line for line in done.stdout.splitlines() if line.startswith("result "))
    return json.loads(line.removeprefix("result "))


def bar(name: str, wanted: str, measured: str, met: bool, judged: bool = True) -> None:
    """Prints one bar's line."""
    print(f"{name} | {wanted} | {measured} | {('yes' if met else 'no') if judged else 'skipped'}")


def medians(found: list[Medians]) -> Medians:
    """Returns the median of each number over all rounds."""
    return {name: statistics.median(values[name] for values in found) for name in found[0]}


def measure_preparation(options: argparse.Namespace) -> Path:
    """Prints the rates of preparation and returns the folder that was prepared."""
    from data_pipeline.tokenizer import Tokenizer

    corpus, path = options.work / "corpus", options.work / "tokenizer.json"
    tokenizer = Tokenizer.load(path)
    files = sorted(corpus.iterdir())
    middle, before = files[len(files) // 2], files[len(files) // 2 - 1]
    raw, fast, slow, peer = [], [], [], []
    for _ in range(options.rounds):
        raw.append(raw_rates(middle, before, tokenizer))
        fast.append(end_to_end(str(corpus), path, options.work / "gigatoken", "gigatoken"))
        peer.append({"rate": megatrons_way(middle, tokenizer.library, options.peer_megabytes)})
        slow.append(end_to_end(str(middle), path, options.work / "tiktoken", "tiktoken"))
    limits, ours, tiktoken = medians(raw), medians(fast), medians(slow)
    print(
        f"{ours['size']:.0f} MB in {ours['documents']:,.0f} documents of "
        f"{ours['size'] * 1e3 / ours['documents']:.1f} kB, {options.rounds} rounds"
    )
    for name, rate in limits.items():
        print(f"raw {name}: {rate:.0f} MB/s")
    chain = 1 / sum(1 / limits[n] for n in ("zstd and lines", "json", "UTF-8", "gigatoken"))
    print(f"raw zstd, json, UTF-8 and gigatoken one after the other, nothing written: {chain:.0f}")
    stages = ("read", "encode", "write", "shuffle", "pack", "verify")
    total = sum(ours[name] for name in stages)
    for name in stages:
        rate = ours["size"] / max(ours[name], 1e-3)
        print(f"stage {name}: {ours[name] / total:.1%} of the time, {rate:.0f} MB/s")
    judge_preparation(limits, ours, tiktoken, medians(peer)["rate"], not options.quick)
    return options.work / "gigatoken"


def judge_preparation(
    limits: Medians, ours: Medians, tiktoken: Medians, peer: float, judged: bool
) -> None:
    """Prints the bars of preparation, and what the Pile would cost."""
    rate, other = ours["rate"], tiktoken["rate"]
    bar("end to end with gigatoken, a core", ">= 75 MB/s", f"{rate:.1f} MB/s", rate >= 75, judged)
    bar("end to end with tiktoken, a core", ">= 8 MB/s", f"{other:.1f} MB/s", other >= 8, judged)
    times = rate / peer
    bar(
        "gigatoken / Megatron's way", ">= 20", f"{times:.1f} ({peer:.2f} MB/s)", times >= 20, judged
    )
    raw = {
        "read": 1 / sum(1 / limits[n] for n in ("zstd and lines", "json", "UTF-8", "sha256")),
        "encode": limits["gigatoken"],
    }
    slowest = max(raw, key=lambda name: ours[name])
    share = ours["size"] / ours[slowest] / raw[slowest]
    bar(f"slowest stage ({slowest}) / its raw rate", ">= 60%", f"{share:.0%}", share >= 0.6, judged)
    for name, found in (("gigatoken", rate), ("tiktoken", other)):
        hours = PILE_BYTES / MEGABYTE / found / 3600
        print(
            f"the Pile (1254 GiB of text) with {name}: {hours:,.1f} core-hours, "
            f"${hours * DOLLARS_PER_CORE_HOUR:.2f} at ${DOLLARS_PER_CORE_HOUR} a core-hour"
        )


def measure_feeding(folder: Path, quick: bool) -> None:
    """Prints the bars of feeding."""
    found = {}
    for batch in (BATCH,) if quick else (8, BATCH, 256):
        runs = [feeding(folder, batch, 200 if quick else 2000) for _ in range(1 if quick else 3)]
        found[batch] = sorted(runs, key=lambda run: run["rate"])[len(runs) // 2]
        run = found[batch]
        print(
            f"batches of {batch} x {SEQUENCE_LENGTH + 1}, {run['epochs']:.1f} epochs: "
            f"{run['rate']:.0f} million tokens per CPU second, {run['rate_wall']:.0f} per second; "
            f"TensorFlow alone hands one batch out again and again at {run['floor']:.0f}"
        )
    run = found[BATCH]
    rate, resume = run["rate"], max(run["resume"])
    above = run["above"]
    bar("feeding, a core", ">= 150 M tokens/s", f"{rate:.0f}", rate >= 150, not quick)
    bar("resume at any position", "< 1 s", f"{resume:.2f} s", resume < 1)
    # In the first half the last buffers come; what leaks goes on in the second.
    for part, first in (("from the first eighth on", 1), ("over the second half", len(above) // 2)):
        growth = above[-1] - above[first]
        bar(f"RssAnon's growth {part}", "<= 20 MB", f"{growth:.0f} MB", growth <= 20)
    most = max(above)
    bar("RssAnon above TensorFlow's own", "< 500 MB", f"{most:.0f} MB", most < 500)


def main() -> None:
    """Runs all measurements."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few MB, one round")
    parser.add_argument("--text", default="", help="folders of real text, separated by commas")
    parser.add_argument("--work", type=Path, help="folder to use; default data/benchmark[_quick]")
    parser.add_argument("--rounds", type=int, default=0, help="default 3")
    options = parser.parse_args()
    quick = options.quick
    options.work = options.work or Path("data/benchmark_quick" if quick else "data/benchmark")
    options.rounds = options.rounds or (1 if quick else 3)
    options.peer_megabytes = 1 if quick else 10
    os.environ["RAYON_NUM_THREADS"] = "1"
    cores = os.sched_getaffinity(0)
    folders = [Path(name) for name in options.text.split(",") if name] or installed_text()
    make_corpus(folders, options.work / "corpus", 8e6 if quick else 1e12)
    vocab_size, sample = (4096, 1e6) if quick else (50257, 20e6)
    make_tokenizer(options.work / "corpus", options.work / "tokenizer.json", vocab_size, sample)
    os.sched_setaffinity(0, sorted(cores)[:1])
    folder = measure_preparation(options)
    measure_feeding(folder, quick)


if __name__ == "__main__":
    main()
