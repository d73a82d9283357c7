"""Solutions of lesson 7: entropy. Run as a script, it makes the experiment of 7.3."""

import math

import torch


def entropy(logits):
    log_probs = logits.log_softmax(-1)  # [..., V]
    return -(log_probs.exp() * log_probs).sum(-1)  # [...], in nats


def top_entropy_mask(entropy, mask, share):
    of_responses = entropy[mask]  # [n], of the whole mini-batch
    count = math.ceil(share * len(of_responses))  # at least 1
    threshold = of_responses.sort(descending=True).values[count - 1]  # τ
    return mask & (entropy >= threshold)  # [N, T]; tokens that tie with τ all enter


# 7.3  Who are the forking tokens of kk_tiny?
#
# 96 responses of kk_tiny to 3 puzzles, sampled at temperature 1 and cut off at 200 tokens:
#
#     5349 tokens; entropy: mean 0.36, median 0.00
#     the top 20 % begin at 1.07 nats
#     their share of all entropy: 79%
#     drawn at a fork: word, times, share of its places that are in the top 20 %, mean entropy
#     ','              80   26% 0.47
#     "'s"             57   43% 0.56
#     ' statement'     51  100% 1.23
#     ' and'           41   98% 1.25
#     ' sounds'        36  100% 1.32
#     ' says'          36  100% 1.28
#     ' remark'        36  100% 1.23
#     ' claim'         35  100% 1.21
#     ' since'         32   97% 1.29
#     ' odd'           31  100% 1.36
#     ' so'            29  100% 1.51
#     ' while'         27  100% 1.26
#
# (The last digits depend on the machine.) At half of the tokens kk_tiny is sure what comes next.
# The forks are choices of wording: statement, remark or claim; and or while; sounds odd or
# otherwise. Its training texts have three to seven wordings of most sentences, drawn at random
# (models/kk_tiny/README.md), and it has learned that they are random. For the answer most of these
# choices do not matter. In Wang et al. the forking tokens of large models connect and direct the
# reasoning. In kk_tiny a high entropy marks what is arbitrary rather than what decides. So the
# 80/20 rule need not help here for the paper's reason.


def open_question():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rewards import kk
    from runtime.chats import encode

    torch.manual_seed(0)
    model = "models/kk_tiny"
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    end = policy.generation_config.eos_token_id
    entropies, tokens = [], []  # of all response tokens
    for puzzle in kk.generate(3, "2-3", seed=0):
        prompt = torch.tensor([encode(tokenizer, puzzle)] * 32)  # [32, prompt's tokens]
        with torch.no_grad():
            ids = policy.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=True, temperature=1.0,
                top_k=0, top_p=1.0, max_new_tokens=200, pad_token_id=end,
            )  # fmt: skip
            start = prompt.shape[1]
            response = ids[:, start:]  # [32, length]
            of_response = entropy(policy(ids).logits[:, start - 1 : -1])  # before each token
        is_end = response == end
        mask = is_end.int().cumsum(1) - is_end.int() == 0  # up to the end token
        entropies.append(of_response[mask])
        tokens.append(response[mask])
    entropies, tokens = torch.cat(entropies), torch.cat(tokens)
    is_top = top_entropy_mask(entropies[None], torch.ones(1, len(tokens), dtype=torch.bool), 0.2)[0]
    mean, median = entropies.mean(), entropies.median()
    print(f"{len(tokens)} tokens; entropy: mean {mean:.2f}, median {median:.2f}")
    print(f"the top 20 % begin at {entropies[is_top].min():.2f} nats")
    print(f"their share of all entropy: {entropies[is_top].sum() / entropies.sum():.0%}")
    print("drawn at a fork: word, times, share of its places that are in the top 20 %, mean entropy")
    rows = []
    for token in tokens.unique():
        here = tokens == token
        rows.append(((here & is_top).sum().item(), token.item(), here))
    for num_top, token, here in sorted(rows, key=lambda row: row[:2], reverse=True)[:12]:
        share, mean = num_top / here.sum(), entropies[here].mean()
        print(f"{tokenizer.decode([token])!r:14} {num_top:4} {share:5.0%} {mean:.2f}")


if __name__ == "__main__":
    open_question()
