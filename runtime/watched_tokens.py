"""Record the effect of an update on the tokens of a few responses, for tools/watch.py."""

import torch
from tokenizers.decoders import DecodeStream

from runtime.passes import micro_batches

KEPT_GROUPS = 2  # two responses are saved per group


def few(batch, args):
    """Return the rows of two responses to each of two problems, a list: a group's best and worst.

    Best and worst by the sum of their advantages. Groups with an advantage come first, because the
    others teach nothing.
    """
    size = args.responses_per_prompt
    of_rows = batch["advantages"].sum(1)  # [N]
    has_advantage = (batch["advantages"] != 0).any(1).view(-1, size).any(1)  # [groups]
    groups = has_advantage.int().argsort(descending=True, stable=True)[:KEPT_GROUPS]
    rows = []
    for group in groups.tolist():
        order = of_rows[group * size : (group + 1) * size].argsort(descending=True, stable=True)
        rows += [group * size + int(i) for i in order[[0, -1][:size]]]
    return rows


@torch.no_grad()
def new_log_probs(policy, batch, args):
    """Return log-probabilities of a batch's response tokens under the current policy, [N, T]."""
    all_logp = torch.zeros(batch["ids"].shape)
    for rows, micro in micro_batches(batch, args, "what the update did"):
        logp, _ = policy(micro["ids"], micro["mask"], args.temperature)
        all_logp[rows, : logp.shape[1]] += logp.cpu()
    return all_logp


def pieces_of(tokenizer, ids):
    """Return the text that each token adds, a list of strings; together they are the whole text.

    If a character spans several tokens, the last token adds it and the others add nothing.
    """
    stream = DecodeStream(skip_special_tokens=False)
    pieces = [stream.step(tokenizer.backend_tokenizer, token) or "" for token in ids]
    if pieces:  # the last character may be incomplete
        pieces[-1] += decode(tokenizer, ids)[len("".join(pieces)) :]
    return pieces


def decode(tokenizer, ids):
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def of_responses(batch, tokenizer):
    """Return a dictionary per row of a batch: its prompt, and values of each token after it.

    batch: ids, mask, old_logp, new_logp and advantages, [N, T]. A conversation's replies are among
    the tokens; is_own is False there, and the other values are 0.
    """
    found = []
    for i, mask in enumerate(batch["mask"]):
        if not mask.any():
            continue
        places = mask.nonzero()[:, 0]
        begin, end = int(places[0]), int(places[-1]) + 1
        response = {
            "prompt": decode(tokenizer, batch["ids"][i][:begin].tolist()),
            "tokens": pieces_of(tokenizer, batch["ids"][i][begin:end].tolist()),
            "is_own": mask[begin:end].tolist(),
        }
        for name in ("old_logp", "new_logp", "advantages"):
            values = (batch[name][i] * mask)[begin:end]
            response[name] = [round(value, 5) for value in values.tolist()]
        found.append(response)
    return found
