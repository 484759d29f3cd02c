"""The model card, and the upload to the Hub against a local server that answers its calls."""

import base64
import http.server
import json
import shutil
import threading
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, metadata_load

from tfbig import export, train
from tfbig.errors import UserError
from tfbig.export_config import ExportConfig
from tfbig.run_folder import read_metrics


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory, small_flags) -> str:
    folder = str(tmp_path_factory.mktemp("card") / "run")
    flags = ["--steps=2", "--tensorboard=false", f"--run_dir={folder}", "--lora_rank=2"]
    assert train._body([*small_flags, *flags]) == 0
    return folder


@pytest.fixture(scope="module")
def exported(finished_run, tmp_path_factory) -> Path:
    return export.run(
        ExportConfig(
            run=finished_run,
            output=str(tmp_path_factory.mktemp("out") / "small-gpt"),
            license="apache-2.0",
            language=("en",),
            watts=65.0,
        )
    )


def test_the_metadata_is_what_the_hub_reads(exported, finished_run):
    metadata = metadata_load(exported / "README.md")
    assert metadata["library_name"] == "transformers"
    assert metadata["pipeline_tag"] == "text-generation"
    assert metadata["license"] == "apache-2.0" and metadata["language"] == ["en"]
    card = ModelCard.load(exported / "README.md")  # checks the model-index
    last = read_metrics(finished_run, "eval")[-1]
    results = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert set(results) == {"loss", "perplexity", "bits_per_byte", "accuracy"}
    for name, value in results.items():
        assert value == pytest.approx(last[name], abs=1e-6)
    assert card.data.model_name == "small-gpt"


def test_the_text_says_what_the_run_did(exported, finished_run):
    text = (exported / "README.md").read_text()
    records = read_metrics(finished_run)
    tokens = sum(record["num_tokens"] for record in records)
    assert f"{tokens:,.0f} tokens were learned" in text and "for 2 steps" in text
    for heading in ("Model Details", "Training Details", "Evaluation", "Limitations"):
        assert f"\n## {heading}\n" in text
    for words in ("| even | train |", "| learning_rate | 0.004 |", "| lora_rank | 2 |"):
        assert words in text
    assert "65 W" in text and "| tensorflow" in text and 'from_pretrained("small-gpt")' in text
    assert finished_run not in text, "no path of the machine that trained"


def test_it_says_what_it_ran_on_and_what_that_took(exported, finished_run, tmp_path):
    from tfbig.interop.model_card import CardOptions, model_card
    from tfbig.profiler.run_data import read_run
    from tfbig.saved_run import SavedRun

    run = shutil.copytree(finished_run, tmp_path / "run")
    [host] = read_run(run).hosts
    named_power = (exported / "README.md").read_text()
    estimated = str(model_card(SavedRun.open(run), "small", CardOptions()))
    for text in (named_power, estimated):
        assert f"| 1 | {host['cpu_quota']:g} | " in text
    assert " kg CO2. Assumed: " in estimated and " kg CO2. Assumed: " not in named_power
    shutil.rmtree(run / "profiler-output")
    unknown = str(model_card(SavedRun.open(run), "small", CardOptions()))
    assert "no energy is estimated" in unknown and "| hosts |" not in unknown


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers the calls of HfApi.create_repo and upload_folder; keeps what was sent."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server = self.server
        server.calls.append((self.path, self.headers.get("authorization", "")))
        if self.path == "/api/repos/create":
            server.created = json.loads(body)
            if server.refuse:
                return self._answer({"error": "no such right"}, 403)
            return self._answer(
                {"url": f"{server.endpoint}/me/small", "name": "me/small", "id": "1"}
            )
        if self.path == "/api/validate-yaml":
            server.checked = json.loads(body)
            return self._answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files
            ]
            return self._answer({"files": modes})
        if "/commit/" in self.path:
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    value = entry["value"]
                    server.files[value["path"]] = base64.b64decode(value["content"])
            url = f"{server.endpoint}/me/small/commit/{'0' * 40}"
            return self._answer({"commitUrl": url, "commitOid": "0" * 40, "success": True})
        return self._answer({}, 404)

    def do_GET(self):
        self.server.calls.append((self.path, self.headers.get("authorization", "")))
        if self.server.refuse:
            return self._answer({"error": "there is no such repository"}, 404)
        return self._answer(
            {"id": "me/small", "modelId": "me/small", "sha": "0" * 40, "siblings": []}
        )

    def _answer(self, value, status=200):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.calls, server.files, server.created, server.refuse = [], {}, {}, False
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = server.endpoint = f"http://127.0.0.1:{server.server_port}"
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", endpoint)
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    yield server
    server.shutdown()
    server.server_close()


def push(exported: Path, run: str, **options) -> Path:
    return export.run(ExportConfig(run=run, output=str(exported), push="me/small", **options))


def test_a_dry_run_sends_nothing_and_lists_everything(exported, finished_run, hub, capsys):
    push(exported, finished_run)
    said = capsys.readouterr().out
    assert hub.calls == [] and "would upload" in said
    for path in exported.iterdir():
        assert f"{path.name}  {path.stat().st_size:,}" in said


def test_every_file_arrives_as_it_is(exported, finished_run, hub, capsys):
    push(exported, finished_run, dry_run=False)
    assert hub.created["name"] == "small"
    # Versions of the library say it in one of two ways.
    assert hub.created.get("private") is True or hub.created["visibility"] == "private"
    assert hub.files == {path.name: path.read_bytes() for path in exported.iterdir()}
    # Of the library's other calls, such as its telemetry's, some carry none.
    ours = [token for path, token in hub.calls if "/create" in path or "/main" in path]
    assert len(ours) >= 3 and set(ours) == {"Bearer hf_of_a_test"}, hub.calls
    assert "library_name: transformers" in hub.checked["content"]
    assert "uploaded" in capsys.readouterr().out


def test_what_the_hub_refuses_is_one_line(exported, finished_run, hub):
    hub.refuse = True
    with pytest.raises(UserError) as error:
        push(exported, finished_run, dry_run=False)
    assert "--push=me/small" in str(error.value) and "\n" not in str(error.value)
    assert hub.files == {}
    with pytest.raises(UserError, match="OWNER/MODEL"):
        export.run(ExportConfig(run=finished_run, push="small"))
    with pytest.raises(UserError, match="--format=hf"):
        export.run(ExportConfig(run=finished_run, push="me/small", format="keras"))
