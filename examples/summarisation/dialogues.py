"""Made-up dialogues with one-sentence summaries, for trying the example without a corpus."""

import json
import random
from pathlib import Path

_NAMES = "Anna Ben Cara Dan Eva Finn Gina Hugo Iris Jon Kate Leo Mia Noah Olga Paul".split()
_THINGS = "bread cake coffee flowers keys laptop milk tickets wine pizza maps paint".split()
_PLACES = "office school station park cinema library market harbour".split()
_TIMES = "six seven eight nine ten noon".split()
_DAYS = ["today", "tomorrow", "on Monday", "on Friday", "on Sunday"]


def dialogue_and_summary(source: random.Random) -> tuple[str, str]:
    """Returns one dialogue and its summary."""
    asking, asked = source.sample(_NAMES, 2)
    thing, place = source.choice(_THINGS), source.choice(_PLACES)
    time, day = source.choice(_TIMES), source.choice(_DAYS)
    if source.random() < 0.5:
        lines = [
            f"{asking}: Hi {asked}, could you bring the {thing} to the {place} {day}?",
            f"{asked}: Sure, is {time} fine?",
            f"{asking}: Perfect, thanks!",
        ]
        return "\n".join(lines), f"{asked} will bring the {thing} to the {place} {day} at {time}."
    lines = [
        f"{asking}: Shall we meet at the {place} {day}?",
        f"{asked}: Yes! I will be there at {time}.",
        f"{asking}: I'll bring {thing}.",
    ]
    return "\n".join(lines), f"{asking} and {asked} will meet at the {place} {day} at {time}."


def write_dialogues(folder: Path, counts: dict[str, int], seed: int = 0) -> dict[str, Path]:
    """Writes a jsonl file with the fields dialogue and summary for each split.

    Args:
      folder: made when missing.
      counts: records by split.
      seed: of the dialogues; splits differ.

    Returns:
      The files by split.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for split, count in counts.items():
        source = random.Random(f"{seed}/{split}")
        files[split] = folder / f"{split}.jsonl"
        with open(files[split], "w", encoding="utf-8") as file:
            for _ in range(count):
                dialogue, summary = dialogue_and_summary(source)
                file.write(json.dumps({"dialogue": dialogue, "summary": summary}) + "\n")
    return files
