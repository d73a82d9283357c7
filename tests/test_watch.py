"""What tools/watch.py shows: what an update did to each token, and a page that follows runs."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import KK_TINY
from fastapi.testclient import TestClient

import grpo
from runtime import records, watched_tokens
from tools import watch


@pytest.mark.parametrize("text", ["Zoey says: “Ana is a knave 🙂🙂.” 数学\n" * 9, " x ↔ y é", ""])
def test_the_pieces_of_a_text_are_the_whole(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    pieces = watched_tokens.pieces_of(tokenizer, ids)
    assert len(pieces) == len(ids) and "".join(pieces) == text
    cut = watched_tokens.pieces_of(tokenizer, ids[:-1])  # in the middle of a sign, too
    assert "".join(cut) == tokenizer.decode(ids[:-1], clean_up_tokenization_spaces=False)


def test_the_best_and_the_worst_of_groups_with_an_advantage_are_kept():
    of_rows = [0, 0, 0, -1, 2, -1, 0, 0, 0, 1, -3, 2.0]  # four groups; the first and the third teach nothing
    advantages = torch.tensor(of_rows)[:, None] * torch.tensor([0.0, 1.0, 1.0])
    for rows, group, expected in ((12, 3, [4, 5, 11, 10]), (6, 3, [4, 5, 0, 2]), (12, 1, [3, 4])):
        args = SimpleNamespace(responses_per_prompt=group)
        assert watched_tokens.few({"advantages": advantages[:rows]}, args) == expected


@pytest.fixture(scope="module")
def run_dir(tokenizer, tmp_path_factory):
    """The folder of a run with one update that makes each weight of the head larger."""
    folder = tmp_path_factory.mktemp("runs") / "a run"
    folder.mkdir()
    args = grpo.Args(model=str(KK_TINY), dtype="float32", responses_per_prompt=2, run_dir=str(folder), steps=7)
    args.micro_batch_tokens = 1000
    policy = grpo.load_policy(args, trained=True)
    ids = torch.zeros(4, 12, dtype=torch.long)
    mask = torch.zeros(4, 12, dtype=torch.bool)
    for row, text in enumerate(["Ana is a knave", "Ana is", "Bo is a knight", "<b>Bo</b>"]):
        response = tokenizer(text)["input_ids"][:9]
        ids[row, : 3 + len(response)] = torch.tensor([5, 6, 7, *response])
        mask[row, 3 : 3 + len(response)] = True
    batch = {"ids": ids, "mask": mask, "advantages": torch.tensor([[1.0], [-1], [2], [-2]]) * mask}
    batch["old_logp"], _ = grpo.log_probs(policy, batch, args)
    with torch.no_grad():
        policy.lm.lm_head.weight.mul_(1.1)
    book = records.Records(args, {"estimated_memory_gb": 1.0})
    book.open(0)
    records.append(folder / "metrics.jsonl", [{"step": 0, "eval/accuracy": 0.25}, {"step": 3, "kl": math.nan}])
    book.write_tokens(3, policy, batch, tokenizer)
    batch["new_logp"], _ = grpo.log_probs(policy, batch, args)
    return folder, batch


def test_the_tokens_of_a_run_have_their_probabilities_before_and_after_the_update(run_dir, tokenizer):
    folder, batch = run_dir
    found = json.loads((folder / "tokens.json").read_text())
    assert found["step"] == 3 and len(found["responses"]) == 4
    for response, row in zip(found["responses"], [0, 1, 2, 3]):
        mask = batch["mask"][row]
        assert response["tokens"] == watched_tokens.pieces_of(tokenizer, batch["ids"][row][mask].tolist())
        assert response["prompt"] == tokenizer.decode([5, 6, 7])
        for name in ("old_logp", "new_logp", "advantages"):
            assert response[name] == pytest.approx(batch[name][row][mask].tolist(), abs=1e-4), name
        assert response["old_logp"] != response["new_logp"]


def test_the_server_gives_runs_and_nothing_else(run_dir):
    get = TestClient(watch.server([run_dir[0].parent])).get
    assert get("/").text == watch.PAGE.read_text()
    [run] = get("/runs").json()
    assert run["name"] == str(run_dir[0]) and run["ago"] < 3600
    assert (run["step"], run["steps"]) == (3, 7)
    assert get("/tokens", params={"name": run["name"]}).json()["step"] == 3
    assert get("/curves").text.rstrip().endswith("</svg>")
    assert [get(path).status_code for path in ("/tokens?name=/etc", "/tokens", "/tools/watch.py")] == [404] * 3
