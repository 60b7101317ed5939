"""What the pages on object stores say of permissions, held against what is asked of a real server."""

import json
import re
from pathlib import Path

import pytest
import torch

import milepost
from tests import pages

HOW_TO = Path(__file__).parent.parent / "docs" / "how-to"
ACTIONS = {"PUT": "s3:PutObject", "GET": "s3:GetObject", "LIST": "s3:ListBucket", "DELETE": "s3:DeleteObject"}


def documents(page):
    """The JSON documents of a page."""
    return [json.loads(block.text) for block in pages.blocks(HOW_TO / page) if block.kind == "json"]


def allowed():
    """The actions of the policy on the page about S3, each with the resources that it is allowed on."""
    [policy] = [each for each in documents("s3.md") if "Statement" in each]
    for statement in policy["Statement"]:
        assert statement["Effect"] == "Allow"
        actions = statement["Action"]
        yield from ((action, statement["Resource"]) for action in ([actions] if isinstance(actions, str) else actions))


def use_everything(root):
    """All that a job asks of a store: saves, an overwrite, steps that are removed, loads, reads."""
    state = {"w": torch.arange(200_000.0), "step": 1}
    milepost.save(state, f"{root}/one")
    milepost.save(state, f"{root}/one")
    milepost.load(state, f"{root}/one")
    with milepost.open(f"{root}/one") as checkpoint:
        assert checkpoint.verify().ok
    with milepost.Checkpointer(f"{root}/run", keep_last=1, background="process") as keeper:
        assert keeper.restore(state, default=0) == 0
        for step in (1, 2):
            keeper.async_save(state, step)
        keeper.wait()
        assert keeper.steps() == [2]
        keeper.remove(2)


def test_policy_for_s3_allows_what_is_asked_and_no_more(seaweed, s3_proxy, monkeypatch):
    for name, value in {**seaweed.environment, "AWS_ENDPOINT_URL": s3_proxy.endpoint}.items():
        monkeypatch.setenv(name, value)
    use_everything("s3://my-bucket/runs")
    asked = set()
    for request in s3_proxy.seen():
        kind, target = request.split(maxsplit=1)
        path, _, query = target.partition("?")
        asked.add(ACTIONS[kind])
        if kind == "LIST":
            assert re.search(r"(^|&)prefix=runs(/|%2F)", query), f"{request}: not below the prefix of the policy"
        elif kind != "DELETE":  # the names of a batch are in its body
            assert path.startswith("/my-bucket/runs/"), request
            assert not query, f"{request}: another action than those of the page"
    assert asked == {action for action, _ in allowed()}


@pytest.mark.parametrize("page", ["s3.md", "gcs.md", "azure.md"])
def test_documents_on_the_pages_are_valid_json(page):
    assert documents(page)
