"""Who a server on 127.0.0.1 listens to: a browser's pages of other sites are not among them."""

import httpx
import pytest

from tests.serving.conftest import serving

ASKED = b'{"prompt": "a", "max_tokens": 1}'


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/invocations"])
def test_a_body_of_no_type(client, path):
    """What a page of another site can send without asking: a Blob that has no type."""
    answer = client.post(path, content=ASKED, headers={"Origin": "http://evil.example"})
    assert "content-type" not in answer.request.headers
    assert answer.status_code == 415
    assert "must be application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/", "/v1/models", "/metrics", "/ping"])
def test_the_name_of_another_site(client, path):
    for name in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "["):
        answer = client.get(path, headers={"Host": name})
        assert answer.status_code == 403, name
        assert "--allowed_hosts" in answer.json()["error"]["message"]
    for name in (
        "localhost",
        "LOCALHOST:80",
        "127.0.0.1:1",
        "127.9.9.9",
        "[::1]:80",
        "a.localhost",
    ):
        assert client.get(path, headers={"Host": name}).status_code == 200, name


def test_further_names_and_addresses(model):
    headers = {"Host": "models.example:443"}
    with serving(model, allowed_hosts=("models.example",)) as address:
        assert httpx.get(f"{address}/v1/models", headers=headers).status_code == 200
    with serving(model, host="0.0.0.0") as address:  # others may call it, by names we do not know
        assert httpx.get(f"{address}/v1/models", headers=headers).status_code == 200
