"""A model card written from the run itself: README.md of a Hugging Face folder. TensorFlow-free."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from tfbig.config import Config, count_parameters
from tfbig.durable_file import write_atomic
from tfbig.errors import UserError
from tfbig.profiler.energy import energy_of
from tfbig.profiler.energy_assumptions import Assumptions
from tfbig.profiler.run_data import RunData, read_run
from tfbig.run_folder import read_metrics
from tfbig.saved_run import SavedRun
from tfbig.variables import num_trained_parameters

_MEASURES = ("loss", "perplexity", "bits_per_byte", "accuracy")
_HYPERPARAMETERS = {
    "optimizer": (
        "optimizer learning_rate beta1 beta2 epsilon weight_decay clip_norm schedule warmup_steps"
        " decay_steps learning_rate_floor ema_decay"
    ).split(),
    "run": "steps global_batch seed".split(),
    "data": ["sequence_length"],
    "parallel": "strategy precision".split(),
    "model": "dropout attention_dropout embedding_dropout".split(),
}


class CardOptions(NamedTuple):
    """What the run cannot know.

    Attributes:
      license: as the Hub names it; "" names none.
      language: codes.
      base_model: on the Hub; "" names none.
      watts: of all devices together; 0 takes what the run measured of its hosts.
    """

    license: str = ""
    language: tuple[str, ...] = ()
    base_model: str = ""
    watts: float = 0.0


class RunFacts(NamedTuple):
    """What a run's files say, up to the exported step.

    Attributes:
      tokens: that were learned.
      seconds: of training steps.
      evaluation: the last one's measures; empty without one.
      data: the data folder's manifest; empty where it is not here.
      measured: what the run's sampler said of its hosts; None where it can't be read.
    """

    tokens: float
    seconds: float
    evaluation: Mapping[str, Any]
    data: Mapping[str, Any]
    measured: RunData | None


def facts_of(saved: SavedRun) -> RunFacts:
    """Returns what a run's metrics and data folder say of it up to the checkpoint's step."""
    from data_pipeline import manifest

    try:
        steps = [r for r in read_metrics(saved.folder.path) if r["step"] <= saved.step]
        evaluations = [
            r for r in read_metrics(saved.folder.path, "eval") if r["step"] <= saved.step
        ]
    except FileNotFoundError:
        steps, evaluations = [], []
    try:
        data = manifest.read(Path(saved.config.data.data)).contents
    except UserError:
        data = {}
    try:
        measured = read_run(saved.folder.path)
    except (UserError, OSError):
        measured = None
    return RunFacts(
        tokens=sum(record["num_tokens"] or 0 for record in steps),
        seconds=sum(record["step_seconds"] or 0 for record in steps),
        evaluation=evaluations[-1] if evaluations else {},
        data=data,
        measured=measured,
    )


def write_model_card(folder: Path, saved: SavedRun, name: str, options: CardOptions) -> None:
    """Writes README.md into an exported folder.

    Args:
      folder: of the export.
      saved: the run.
      name: of the model.
      options: what the run cannot know.
    """
    write_atomic(folder / "README.md", str(model_card(saved, name, options)).encode())


def model_card(saved: SavedRun, name: str, options: CardOptions) -> ModelCard:
    """Returns the card of a run's model.

    Args:
      saved: the run.
      name: of the model.
      options: what the run cannot know.
    """
    facts = facts_of(saved)
    data_name = Path(saved.config.data.data).name or saved.config.data.source
    metadata = ModelCardData(
        language=list(options.language) or None,
        license=options.license or None,
        library_name="transformers",
        tags=["text-generation", "tfbig"],
        base_model=options.base_model or None,
        pipeline_tag="text-generation",
        model_name=name,
        metrics=[m for m in _MEASURES if m in facts.evaluation] or None,
        eval_results=_eval_results(facts, data_name) or None,
    )
    sections = [
        f"# {name}",
        *_details(saved, facts, options),
        *_usage(name),
        *_training(saved, facts, data_name),
        *_evaluation(facts, data_name),
        *_cost(saved, facts, options),
        *_limits(facts),
        *_versions(saved.folder.read_config()["versions"]),
    ]
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n" + "\n".join(sections) + "\n")


def _eval_results(facts: RunFacts, data_name: str) -> list[EvalResult]:
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=data_name,
            dataset_name=data_name,
            dataset_split="validation",
            metric_type=measure,
            metric_value=round(float(facts.evaluation[measure]), 6),
        )
        for measure in _MEASURES
        if facts.evaluation.get(measure) is not None
    ]


def _details(saved: SavedRun, facts: RunFacts, options: CardOptions) -> Iterator[str]:
    config, model = saved.config, saved.merged_model
    kind = "GPT-NeoX" if model.position_embedding == "rotary" else "GPT-2"
    yield (
        f"\nA causal language model of {count_parameters(model):,} parameters in the architecture "
        f"of {kind}, trained with tfbig for {saved.step:,} steps.\n"
    )
    yield "## Model Details\n"
    yield from _table(
        ("", ""),
        [
            ("layers", model.num_layers),
            ("width", model.embed_dim),
            ("heads", model.num_heads),
            ("feed-forward width", model.hidden_dim),
            ("context", f"{model.max_length} tokens"),
            ("vocabulary", f"{model.vocab_size:,} entries"),
            ("positions", model.position_embedding),
            ("licence", options.license or "none was named"),
            ("started from", options.base_model or _origin(config)),
        ],
    )


def _origin(config: Config) -> str:
    """Returns what the weights were before; of a path only its last part, which says enough."""
    return Path(config.run.init_from).name if config.run.init_from else "random weights"


def _usage(name: str) -> Iterator[str]:
    yield "\n## How to Get Started\n\n```python"
    yield "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
    yield f'model = AutoModelForCausalLM.from_pretrained("{name}")'
    yield f'tokenizer = AutoTokenizer.from_pretrained("{name}")'
    yield 'inputs = tokenizer("Once", return_tensors="pt")'
    yield "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))\n```"


def _training(saved: SavedRun, facts: RunFacts, data_name: str) -> Iterator[str]:
    config = saved.config
    yield "\n## Training Details\n\n### Data\n"
    yield f"`{data_name}`; {facts.tokens:,.0f} tokens were learned, repetitions counted."
    splits = facts.data.get("splits", {})
    rows = [
        (source, split, f"{counts['rows']:,}", f"{counts['bytes']:,}")
        for split, described in splits.items()
        for source, counts in described["sources"].items()
    ]
    if rows:
        yield ""
        yield from _table(("source", "split", "samples", "bytes of learned text"), rows)
    yield "\n### Hyperparameters\n"
    sections = {name: getattr(config, name) for name in _HYPERPARAMETERS}
    values = [
        (field, getattr(sections[name], field))
        for name, fields in _HYPERPARAMETERS.items()
        for field in fields
    ]
    if config.model.lora_rank or config.optimizer.freeze:
        trained = num_trained_parameters(config.model, config.optimizer.freeze)
        values += [("lora_rank", config.model.lora_rank), ("lora_alpha", config.model.lora_alpha)]
        values += [("freeze", ", ".join(config.optimizer.freeze) or "none")]
        values += [("trained parameters", f"{trained:,}")]
    yield from _table(("", "value"), values)


def _evaluation(facts: RunFacts, data_name: str) -> Iterator[str]:
    yield "\n## Evaluation\n"
    if not facts.evaluation:
        yield "The run made no evaluation."
        return
    yield f"On the validation split of `{data_name}` at step {facts.evaluation['step']:,}.\n"
    found = [(m, facts.evaluation[m]) for m in _MEASURES if facts.evaluation.get(m) is not None]
    yield from _table(("measure", "value"), [(name, f"{value:.4f}") for name, value in found])


def _cost(saved: SavedRun, facts: RunFacts, options: CardOptions) -> Iterator[str]:
    hours = facts.seconds / 3600
    yield "\n## Environmental Impact\n"
    yield from _hardware(facts)
    yield (
        f"Training steps took {hours:.3g} hours with `--strategy={saved.config.parallel.strategy}`"
        " (waiting for data counted; evaluations and checkpoints not)."
    )
    if options.watts > 0:
        energy = hours * options.watts / 1000
        yield (
            f"Estimated energy: {energy:.3g} kWh = {hours:.3g} h x {options.watts:g} W. It assumes "
            "that the devices drew this power, named by whoever exported the model, all the time; "
            "cooling and idle machines are not counted, nor is the carbon of the grid known."
        )
        return
    found = energy_of(facts.measured, Assumptions()) if facts.measured else None
    if found is None:
        yield "No power was named and no host was sampled, so that no energy is estimated."
        return
    yield (
        f"Estimated energy of the whole run: {found.joules / 3.6e6:.3g} kWh, "
        f"{found.kilograms:.3g} kg CO2. Assumed: {found.basis}."
    )


def _hardware(facts: RunFacts) -> Iterator[str]:
    """Yields a table of the hosts, those that are alike in one row; their names are nobody's."""
    hosts = facts.measured.hosts if facts.measured else []
    kinds = Counter(
        (
            f"{host['cpu_quota']:g}",
            f"{host['memory_bytes'] / 2**30:.0f} GiB",
            ", ".join(f"{n} x {name}" for name, n in Counter(host["gpus"]).items()) or "none",
        )
        for host in hosts
    )
    if kinds:
        rows = [(count, *kind) for kind, count in kinds.items()]
        yield from _table(("hosts", "CPU cores", "memory", "GPUs"), rows)
        yield ""


def _limits(facts: RunFacts) -> Iterator[str]:
    yield "\n## Limitations\n"
    yield (
        "The model continues text as its data would; it states falsehoods, repeats what the data "
        "holds, and takes over its biases. It was not tuned to follow instructions or to refuse "
        "unless its data says so above. Nothing but the measures above was evaluated."
    )


def _versions(versions: Mapping[str, str]) -> Iterator[str]:
    yield "\n## Technical Specifications\n"
    yield from _table(("package", "version"), list(versions.items()))


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"
