"""Preparation and feeding beside their raw limits: `python -m benchmarks.data --text=FOLDER`.

FOLDER holds real text (.txt, .rst, .html, also .gz), 200 MB and more: Debian's packages
linux-doc-6.1 and python3.11-doc unpacked (`apt-get download`, `dpkg-deb -x`). It is stripped of
tags and cut into pages of about 4 KiB at blank lines. Rates are per second of CPU (user and system,
all processes) and per second of wall; on a busy machine the first says more.
"""

import argparse
import gzip
import html
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

PILE_BYTES = 1254 * 2**30  # of text, as released
DOLLARS_PER_CORE_HOUR = 0.045  # about an on-demand vCPU of a c7i/m7i instance, us-east-1, 2026
PAGE_CHARACTERS = 4096
SEQUENCE_LENGTH, BATCH = 2048, 64
_TAG = re.compile(r"<(script|style)\b.*?</\1>|<[^>]+>", re.DOTALL)


def cpu_seconds() -> float:
    """Returns CPU time of this process and its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(entry.ru_utime + entry.ru_stime for entry in used)


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Returns a call's result, its CPU seconds and its wall seconds."""
    cpu, wall = cpu_seconds(), time.perf_counter()
    result = work()
    return result, cpu_seconds() - cpu, time.perf_counter() - wall


def pages(folder: Path) -> Iterator[str]:
    """Yields pages of the text files under a folder."""
    for path in sorted(folder.rglob("*")):
        name = path.name.removesuffix(".gz")
        if not path.is_file() or not name.endswith((".txt", ".rst", ".html")):
            continue
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode("utf-8", "ignore")
        if name.endswith(".html"):
            text = html.unescape(_TAG.sub("", text))
        page, size = [], 0
        for paragraph in re.split(r"\n\s*\n", text):
            page.append(paragraph)
            size += len(paragraph)
            if size >= PAGE_CHARACTERS:
                yield "\n\n".join(page)
                page, size = [], 0
        if size > 200:
            yield "\n\n".join(page)


def make_corpus(text: Path, folder: Path) -> None:
    """Writes the corpus as jsonl.zst files of about 50 MB of text, unless it is there."""
    from data_pipeline.stdlib_corpus import encode_jsonl_zst

    if folder.exists():
        return
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    part: list[tuple[str, str]] = []
    size = number = 0
    for page in pages(text):
        part.append((page, "documentation"))
        size += len(page)
        if size > 50e6:
            (temporary / f"{number:02d}.jsonl.zst").write_bytes(encode_jsonl_zst(part))
            part, size, number = [], 0, number + 1
    (temporary / f"{number:02d}.jsonl.zst").write_bytes(encode_jsonl_zst(part))
    temporary.rename(folder)


def make_tokenizer(corpus: Path, path: Path) -> None:
    """Trains a BPE of GPT-2's size on 20 MB of the corpus, unless it is there."""
    from data_pipeline.documents import ReadCounts
    from data_pipeline.reading import read_documents
    from data_pipeline.tokenizer import train_tokenizer

    if path.exists():
        return
    texts, size = [], 0
    for file in sorted(corpus.iterdir()):
        for number, document in enumerate(read_documents(file, ReadCounts())):
            if number % 12 == 0 and size < 20e6:
                texts.append(document.text)
                size += len(document.text)
    path.write_bytes(train_tokenizer(texts, 50257))


def raw_limits(file: Path, tokenizer: Any) -> dict[str, float]:
    """Returns MB of text per CPU second of each stage's core operation alone, on one file."""
    import orjson

    from data_pipeline.codecs import ByteReader, decompress, split_lines
    from data_pipeline.encoders import TokenEncoder
    from data_pipeline.shards import masked_crc32c

    read = lambda: list(split_lines(decompress(iter(ByteReader(str(file))), ".zst", "")))  # noqa: E731
    lines, seconds, _ = timed(read)
    size = sum(map(len, lines)) / 1e6
    rates = {"zstd and lines": size / seconds}
    texts, seconds, _ = timed(lambda: [orjson.loads(line)["text"] for line in lines])
    rates["json"] = size / seconds
    some = texts[:1500]
    part = sum(len(text.encode()) for text in some) / 1e6
    for name in ("gigatoken", "tiktoken", "tokenizers"):
        try:
            encoder = TokenEncoder(tokenizer, name)
        except ValueError as error:
            print(f"  {name}: {error}")
            continue
        encoder.encode(some[:10])
        if name == "gigatoken":
            encoder.encode(texts)  # its cache of pieces is warm in a long run
            _, seconds, _ = timed(lambda encoder=encoder: encoder.encode(texts))
            rates[name] = size / seconds
        else:
            _, seconds, _ = timed(lambda encoder=encoder: encoder.encode(some))
            rates[name] = part / seconds
    block = os.urandom(1 << 26)
    _, seconds, _ = timed(lambda: sha256(block))
    rates["sha256"] = len(block) / 1e6 / seconds
    rows = [block[k : k + 4098] for k in range(0, len(block), 4098)]
    _, seconds, _ = timed(lambda: masked_crc32c(rows))
    rates["crc32c by row"] = len(block) / 1e6 / seconds
    return rates


def megatrons_way(file: Path, tokenizer_path: Path, megabytes: float) -> float:
    """Returns MB per CPU second of the tokenizers library, one json line at a time.

    As tools/preprocess_data.py of Megatron-LM works within each of its processes.
    """
    import io

    import tokenizers
    import zstandard

    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_path))

    def work() -> int:
        size = 0
        with open(file, "rb") as opened, open(os.devnull, "wb") as output:
            lines = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(opened))
            for line in lines:
                text = json.loads(line)["text"]
                output.write(np.array(tokenizer.encode(text).ids, np.uint16).tobytes())
                size += len(text.encode())
                if size > megabytes * 1e6:
                    break
        return size

    size, seconds, _ = timed(work)
    return size / 1e6 / seconds


def end_to_end(files: str, tokenizer: Path, folder: Path, encoder: str) -> dict[str, float]:
    """Prepares a folder with one process and verifies it; returns MB/s and stages' shares."""
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
        chunk_bytes=200 << 20,
    )
    _, cpu, wall = timed(lambda: prepare(config, said.append))
    problems, verify_cpu, _ = timed(lambda: list(find_problems(folder, lambda text: None)))
    assert not problems, problems
    contents = json.loads((folder / "manifest.json").read_text())
    entries = [entry for split in contents["statistics"].values() for entry in split.values()]
    size = sum(entry["bytes"] for entry in entries) / 1e6
    documents = sum(entry["documents"] for entry in entries)
    line = next(text for text in said if "seconds of all" in text)
    stages = {name: float(value) for name, value in re.findall(r"(\w+) ([\d.]+)", line)}
    print(
        f"{encoder}: {size:.0f} MB in {documents:,} documents of {size * 1e3 / documents:.1f} kB: "
        f"{size / cpu:.1f} MB per CPU second, {size / wall:.1f} MB/s; with verifying "
        f"{size / (cpu + verify_cpu):.1f} MB per CPU second"
    )
    total = sum(stages.values())
    for name, seconds in stages.items():
        print(f"  {name:<8} {seconds / total:6.1%}  {size / max(seconds, 1e-3):8.0f} MB/s")
    return {"cpu": size / (cpu + verify_cpu), **stages, "size": size}


FEED = """
import os, resource, sys, time
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(1)
from data_pipeline.dataset import TokenData

def anonymous():
    text = open("/proc/self/status").read()
    return int(text.split("RssAnon:")[1].split()[0]) / 1024

folder, batch = sys.argv[1], int(sys.argv[2])
tf.constant(1) + 1
alone = anonymous()
data = TokenData.open(folder)
epoch = data.num_rows("train")
steps = max(2000, 2 * epoch // batch)
for position in (0, 10**6 + 7, 10**11 + 13):
    start = time.perf_counter()
    next(iter(data.train_batches(position, steps, batch)))
    print(f"  first batch at sample {position:,}: {time.perf_counter() - start:.2f} s")
batches = iter(data.train_batches(0, steps, batch))
for _ in range(100):
    next(batches)
memory, cpu, wall = [anonymous()], time.process_time(), time.perf_counter()
for step in range(steps - 100):
    next(batches)
    if step % (steps // 8) == 0:
        memory.append(anonymous())
cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
tokens = (steps - 100) * batch * data.sequence_length / 1e6
print(f"  batches of {batch} x {data.sequence_length + 1}, {steps * batch / epoch:.1f} epochs: "
      f"{tokens / cpu:.0f} million tokens per CPU second, {tokens / wall:.0f} per second")
print(f"  RssAnon: TensorFlow alone {alone:.0f} MB, then above it "
      + ", ".join(f"{m - alone:.0f}" for m in memory) + " MB")
spec = next(iter(data.train_batches(0, 1, batch)))
same = tf.data.Dataset.from_tensors(spec).repeat(steps).prefetch(4)
cpu = time.process_time()
for _ in same: pass
print(f"  TensorFlow's own floor, one batch handed out again and again: "
      f"{steps * batch * data.sequence_length / 1e6 / (time.process_time() - cpu):.0f}")
"""


def feeding(folder: Path) -> None:
    """Prints what batches cost, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    for batch in (8, BATCH, 256):
        command = [sys.executable, "-c", FEED, str(folder), str(batch)]
        subprocess.run(command, env=environment, check=True, timeout=900)


def main() -> None:
    """Runs all measurements."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="folder of real text")
    parser.add_argument("--work", type=Path, default=Path("data/benchmark"), help="folder to use")
    parser.add_argument("--tiktoken_megabytes", type=int, default=50)
    options = parser.parse_args()
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    corpus, tokenizer_path = options.work / "corpus", options.work / "tokenizer.json"
    make_corpus(options.text, corpus)
    make_tokenizer(corpus, tokenizer_path)
    from data_pipeline.tokenizer import Tokenizer

    first = sorted(corpus.iterdir())[0]
    print("raw rates, MB of text per CPU second:")
    limits = raw_limits(first, Tokenizer.load(tokenizer_path))
    for name, rate in limits.items():
        print(f"  {name:<16} {rate:8.1f}")
    peer = megatrons_way(first, tokenizer_path, 10)
    print(f"tokenizers + json line by line: {peer:.2f} MB per CPU second")
    print("end to end, one process, jsonl.zst to verified shards:")
    fast = end_to_end(str(corpus), tokenizer_path, options.work / "gigatoken", "gigatoken")
    slow = end_to_end(str(first), tokenizer_path, options.work / "tiktoken", "tiktoken")
    print(f"gigatoken end to end is {fast['cpu'] / peer:.0f} x Megatron's way")
    encode = fast["size"] / fast["encode"]
    print(f"the encoder runs at {encode / limits['gigatoken']:.0%} of its raw rate")
    for name, rates in (("gigatoken", fast), ("tiktoken", slow)):
        hours = PILE_BYTES / 1e6 / rates["cpu"] / 3600
        print(
            f"the Pile (1254 GiB) with {name}: {hours:,.1f} core-hours, "
            f"${hours * DOLLARS_PER_CORE_HOUR:.2f} at ${DOLLARS_PER_CORE_HOUR} a core-hour"
        )
    print("feeding:")
    feeding(options.work / "gigatoken")


if __name__ == "__main__":
    main()
