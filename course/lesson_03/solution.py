"""Solutions of lesson 3: sampler and trainer. Run as a script, it makes the experiment of 3.3."""

import torch


def sampler_gap(sampler_logp, trainer_logp, mask):
    gap = (sampler_logp - trainer_logp).abs()  # [N, T], in nats
    return gap[mask].sum() / mask.sum()


def truncated_weights(trainer_logp, sampler_logp, cap):
    weights = (trainer_logp - sampler_logp).exp()  # π_old / π_sampler, [N, T]
    return weights.clamp(max=cap).detach()


# 3.3  What does the gap show if weights are not synced, or if the temperatures differ?
#
# `python grpo.py --model models/kk_tiny --steps 3 --no_stop_at_gap`, then again with two lines of
# main taken out: `sync_weights(policy, llm, args)` at the end of a step, and `sampler.sleep(llm)`,
# from which only the sync wakes the sampler. sampler_gap is in the run's metrics.jsonl. Here the
# same is done without vLLM: 16 responses of kk_tiny to 2 puzzles, sampled at temperature 1. What
# stands for the sampler computes in bfloat16, the trainer in float32.
#
#     same weights, same temperature: gap 0.0035
#     the trainer made one update of lr 1e-4, not synced: gap 0.0153
#     the trainer made ten such updates, not synced: gap 0.1706
#     same weights, the trainer divides by temperature 0.7: gap 0.0445
#
# (The last digits depend on the machine.) The first number is rounding. It is the level to compare
# with: if a run's gap stays there, the sampler has the trainer's weights. Without sync the gap
# grows with each update, so look at several steps, not one. A wrong temperature shows at the first
# step, before any weight has moved. The gap does not say which of the two sides is wrong.


def open_question():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rewards import kk
    from runtime.chats import encode

    torch.manual_seed(0)
    model = "models/kk_tiny"
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    sampler = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    end = trainer.generation_config.eos_token_id
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-4, weight_decay=0.01)

    def log_probs(lm, ids, temperature=1.0):  # [N, T] → [N, T - 1]: of each token but the first
        logits = lm(ids).logits[:, :-1].float() / temperature  # what the next token is drawn from
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[:, :, 0]

    batches = []  # for each puzzle: ids [8, T], mask [8, T - 1], advantages [8]
    for puzzle in kk.generate(2, "2-3", seed=0):
        prompt = torch.tensor([encode(tokenizer, puzzle)] * 8)  # [8, prompt's tokens]
        ids = trainer.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=True, temperature=1.0,
            top_k=0, top_p=1.0, max_new_tokens=160, pad_token_id=end,
        )  # fmt: skip
        response = ids[:, prompt.shape[1] :]
        is_end = response == end
        after_end = is_end.int().cumsum(1) - is_end.int() > 0
        mask = torch.cat([torch.zeros(8, prompt.shape[1] - 1, dtype=torch.bool), ~after_end], 1)
        texts = tokenizer.batch_decode(response, skip_special_tokens=True)
        rewards = torch.tensor([kk.score(text, puzzle["answer"])["reward"] for text in texts])
        batches.append((ids, mask, rewards - rewards.mean()))

    def mean_gap(temperature=1.0):
        gaps, counts = [], []
        with torch.no_grad():
            for ids, mask, _ in batches:
                of_trainer = log_probs(trainer, ids, temperature)
                gaps.append(sampler_gap(log_probs(sampler, ids), of_trainer, mask))
                counts.append(mask.sum())
        return (torch.stack(gaps) * torch.stack(counts)).sum() / sum(counts)

    def update():
        num_tokens = sum(mask.sum() for _, mask, _ in batches)
        for ids, mask, advantages in batches:
            objective = (advantages[:, None] * log_probs(trainer, ids))[mask].sum()
            (-objective / num_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    print(f"same weights, same temperature: gap {mean_gap():.4f}")
    with_wrong_temperature = mean_gap(temperature=0.7)
    update()
    print(f"the trainer made one update of lr 1e-4, not synced: gap {mean_gap():.4f}")
    for _ in range(9):
        update()
    print(f"the trainer made ten such updates, not synced: gap {mean_gap():.4f}")
    wrong = f"{with_wrong_temperature:.4f}"
    print(f"same weights, the trainer divides by temperature 0.7: gap {wrong}")


if __name__ == "__main__":
    open_question()
