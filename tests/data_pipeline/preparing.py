"""Inputs of several kinds, prepared in a process that may be killed at a chosen place."""

import json
import os
import subprocess
import sys

from sample_corpus import corpus_documents

from data_pipeline.stdlib_corpus import encode_jsonl_zst

# Prepares in a process of its own, which ends itself at the n-th fsync or rename.
WORKER = """
import os, signal, sys
import data_pipeline.preparation as preparation
from tfbig.config import PrepareConfig

place, config = int(sys.argv[1]), eval(sys.argv[2])
count = 0

def counted(operation):
    def call(*arguments, **keywords):
        global count
        count += 1
        if count == place:
            os.kill(os.getpid(), signal.SIGKILL)
        return operation(*arguments, **keywords)
    return call

os.fsync, os.replace, os.rename = counted(os.fsync), counted(os.replace), counted(os.rename)
preparation.prepare(config, say=lambda text: None)
print(count)
"""


def quiet(text):
    pass


def work(place, config, **environment):
    return subprocess.run(
        [sys.executable, "-c", WORKER, str(place), repr(config)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def make_several_inputs(folder):
    """Several files of several kinds, of which some are split and some are read together."""
    folder.mkdir()
    documents = list(corpus_documents())
    for number in range(3):
        path = folder / f"{number}.jsonl.zst"
        path.write_bytes(encode_jsonl_zst(documents[number::4]))
    lines = [
        json.dumps({"text": text, "meta": {"pile_set_name": source}})
        for text, source in documents[3::4]
    ]
    (folder / "3.jsonl").write_text("\n".join(lines))
    (folder / "notes.txt").write_text("one document of a text file " * 9)
