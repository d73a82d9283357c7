"""Cases and known mistakes of lesson 12."""

import torch

from course.cases import Case, Exercise, bools, floats
from course.small_tokenizer import decode, encode

END, NEWLINE, START, USER, MODEL = 2, 5, 1, 6, 7
CHAT = {"before": [NEWLINE, START, USER, NEWLINE], "after": [END, NEWLINE, START, MODEL, NEWLINE]}


def drawn(rng, low, high):
    return int(torch.randint(low, high, (), generator=rng))


def words(rng):
    return torch.randint(10, 60, (drawn(rng, 1, 4),), generator=rng).tolist()


def random_conversation(rng):
    replies = [words(rng) for _ in range(drawn(rng, 1, 4))]
    turns = [[*words(rng), END] for _ in range(len(replies) + 1)]
    return {"prompt": words(rng), "turns": turns, "replies": replies, **CHAT, "length": 60}


def row(
    prompt, turns, replies, before, after, length, *,
    own_prompt=False, own_before=False, own_reply=False, own_after=False, own_end=True, own_padding=False,
):  # fmt: skip
    """The right row, or one in whose mask other tokens are True, too. before: also a list for each reply."""
    parts = [(prompt, own_prompt)]
    for i, turn in enumerate(turns):
        if i > 0:
            parts += [(before, own_before), (replies[i - 1], own_reply), (after, own_after)]
        ended = len(turn) - (turn[-1:] == [END])
        parts += [(turn[:ended], True), (turn[ended:], own_end)]
    ids = [token for part, _ in parts for token in part]
    own = [is_own for part, is_own in parts for _ in part]
    padding = length - len(ids)
    return torch.tensor(ids + [0] * padding), torch.tensor(own + [own_padding] * padding)


def changed(**options):
    return lambda *arguments: row(*arguments, **options)


def until_last_reply(prompt, turns, replies, *rest):
    return row(prompt, turns[:-1], replies, *rest)


def last_turn_alone(*arguments):
    ids, mask = row(*arguments)
    gaps = (~mask[:-1] & mask[1:]).nonzero()  # the places before a turn
    return ids, mask & (torch.arange(len(mask)) > gaps[-1])


def padded_on_the_left(prompt, turns, replies, before, after, length):
    ids, mask = row(prompt, turns, replies, before, after, length)
    used = len(prompt) + sum(map(len, turns + replies)) + len(replies) * (len(before) + len(after))
    return ids.roll(length - used), mask.roll(length - used)


def shifted(*arguments):
    ids, mask = row(*arguments)
    return ids, mask.roll(-1)


CONVERSATION_ROW = Exercise(
    "12.1",
    "conversation_row",
    cases=[
        # One token after another: prompt 9, turn 8 2, template 5, reply 4, template 3, turn 8 2, one zero.
        Case(
            {"prompt": [9], "turns": [[8, 2], [8, 2]], "replies": [[4]], "before": [5], "after": [3], "length": 9},
            (torch.tensor([9, 8, 2, 5, 4, 3, 8, 2, 0]), bools([0, 1, 1, 0, 0, 0, 1, 1, 0])),
        ),
        # One turn, and no reply.
        Case(
            {"prompt": [9, 9], "turns": [[8, 2]], "replies": [], "before": [5, 1], "after": [3], "length": 5},
            (torch.tensor([9, 9, 8, 2, 0]), bools([0, 0, 1, 1, 0])),
        ),
        # Two replies; the last turn was cut off, and has no end token.
        Case(
            {
                "prompt": [9],
                "turns": [[8, 2], [2], [7, 7]],
                "replies": [[4], [6]],
                "before": [5, 1],
                "after": [3, 1],
                "length": 17,
            },
            (
                torch.tensor([9, 8, 2, 5, 1, 4, 3, 1, 2, 5, 1, 6, 3, 1, 7, 7, 0]),
                bools([0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 0]),
            ),
        ),
    ],
    random=random_conversation,
    mistakes={
        "the replies are in the mask: the model did not write them": (
            changed(own_before=True, own_reply=True, own_after=True)
        ),
        "the replies' texts are in the mask: the model did not write them": changed(own_reply=True),
        "what the template puts before the next turn is in the mask: the model did not write it": (
            changed(own_after=True)
        ),
        "the prompt is in the mask": changed(own_prompt=True),
        "the padding is in the mask": changed(own_padding=True),
        "the end tokens are not in the mask: then the model never learns when to stop": changed(own_end=False),
        "only the last turn is in the mask: all turns share the conversation's reward": last_turn_alone,
        "the mask is one place early: it marks the tokens, not the places that predict them": shifted,
        "the newline after the end token is missing: `before` begins with it, and the model has read it so": (
            lambda prompt, turns, replies, before, after, length: row(prompt, turns, replies, before[1:], after, length)
        ),
        "`before` is missing: the reply follows the end token without the template's tokens": (
            lambda prompt, turns, replies, before, after, length: row(prompt, turns, replies, [], after, length)
        ),
        "`after` is missing: the next turn follows the reply without the template's tokens": (
            lambda prompt, turns, replies, before, after, length: row(prompt, turns, replies, before, [], length)
        ),
        "the last turn is missing: there is one reply fewer than turns, and zip ends with the shorter list": (
            until_last_reply
        ),
        "padding is on the left: it comes behind the conversation": padded_on_the_left,
    },
)


def random_conversations(rng):
    """Prompt, two or three turns with replies between them, padding."""
    mask = torch.zeros(4, 24, dtype=torch.bool)
    for of_row in mask:
        place = drawn(rng, 1, 4)
        for _ in range(drawn(rng, 2, 4)):
            end = place + drawn(rng, 1, 4)
            of_row[place:end] = True
            place = end + drawn(rng, 1, 4)
    logp = -4 * torch.rand(mask.shape, generator=rng)
    return {"logp": logp, "advantages": torch.randn(4, generator=rng), "mask": mask}


def with_gaps(mask):
    """True from a row's first turn to the end of its last one: replies, too."""
    return (mask.cummax(1).values.bool()) & (mask.flip(1).cummax(1).values.flip(1).bool())


def number_of_turn(mask):
    """1 on the first turn's tokens, 2 on the second's; 0 elsewhere."""
    begins = mask & ~torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], 1)
    return begins.cumsum(1) * mask


def loss(logp, advantages, mask, weight=1.0, divisor=None):
    """weight: of each token; divisor: None for the number of tokens in the mask."""
    terms = (advantages[:, None] * logp * weight)[mask]
    return -terms.sum() / (mask.sum() if divisor is None else divisor)


def mean_of_turns(logp, advantages, mask):
    turn = number_of_turn(mask)
    tokens = (turn[:, :, None] == turn[:, None, :]).sum(2)  # of a token's own turn
    return loss(logp, advantages, mask, 1 / tokens.clamp(min=1), turn.amax(1).sum())


def first_turn(mask):
    return mask & (number_of_turn(mask) == 1)


def last_turn(mask):
    turn = number_of_turn(mask)
    return mask & (turn == turn.amax(1, keepdim=True))


CONVERSATION_LOSS = Exercise(
    "12.2",
    "conversation_loss",
    gradient="logp",
    cases=[
        # Turns at places 1 and 3: (1 + 3) · 2 / 2. The reply at place 2 is in no sum.
        Case(
            {"logp": floats([[-9, -1, -7, -3]]), "advantages": floats([2]), "mask": bools([[0, 1, 0, 1]])},
            4.0,
        ),
        # −(1 · (−1 − 2 − 3) − 1 · (−5 − 6)) / 5 = −(−6 + 11)/5; the first row has a reply of two tokens.
        Case(
            {
                "logp": floats([[-1, -2, -8, -8, -3], [-5, -8, -6, 0, 0]]),
                "advantages": floats([1, -1]),
                "mask": bools([[1, 1, 0, 0, 1], [1, 0, 1, 0, 0]]),
            },
            -1.0,
        ),
    ],
    random=random_conversations,
    padding="logp",
    mistakes={
        "the divisor counts the replies: |o_i| is the number of the model's own tokens": (
            lambda logp, advantages, mask: loss(logp, advantages, mask, divisor=with_gaps(mask).sum())
        ),
        "the replies carry a gradient: the model would learn to predict its tool": (
            lambda logp, advantages, mask: loss(logp, advantages, with_gaps(mask))
        ),
        "the replies carry a gradient, although the divisor does not count them": (
            lambda logp, advantages, mask: loss(logp, advantages, with_gaps(mask), divisor=mask.sum())
        ),
        "only the last turn is trained: the calls before it earned the reward, too": (
            lambda logp, advantages, mask: loss(logp, advantages, last_turn(mask))
        ),
        "only the first turn is trained: the mask has gaps, and goes on behind them": (
            lambda logp, advantages, mask: loss(logp, advantages, first_turn(mask))
        ),
        "the advantage is divided among the turns: each turn has all of it": (
            lambda logp, advantages, mask: loss(logp, advantages / number_of_turn(mask).amax(1), mask)
        ),
        "is a mean of means over turns: all tokens weigh alike": mean_of_turns,
        "is a mean of means over conversations: all tokens weigh alike": (
            lambda logp, advantages, mask: loss(logp, advantages, mask, 1 / mask.sum(1, keepdim=True), len(mask))
        ),
        "is the sum: divide by the number of the model's own tokens": (
            lambda logp, advantages, mask: loss(logp, advantages, mask, divisor=1)
        ),
        "divides by the number of conversations": (
            lambda logp, advantages, mask: loss(logp, advantages, mask, divisor=len(mask))
        ),
        "divides by all positions, prompts and padding among them": (
            lambda logp, advantages, mask: loss(logp, advantages, mask, divisor=mask.numel())
        ),
        "has the wrong sign: the loss is −J": lambda logp, advantages, mask: -loss(logp, advantages, mask),
    },
)

PIECES = [*"abc31 *(|", "ab", "bc", "31", "c(", "ab31"]
LONGER = PIECES.index("ab")  # the first piece of more than one character


def random_texts(rng):
    """Some conversations in their usual split, and some in another one."""
    conversations = []
    for i in range(5):
        text = "".join(PIECES[drawn(rng, 0, len(PIECES))] for _ in range(6)) + "|"
        ids = encode(text, PIECES)
        longer = [place for place, token in enumerate(ids) if token >= LONGER and place > 0]
        if i % 2 and longer:
            place = longer[drawn(rng, 0, len(longer))]
            ids[place : place + 1] = [PIECES.index(sign) for sign in PIECES[ids[place]]]
        conversations.append(ids)
    return {"conversations": conversations, "pieces": PIECES}


def of_each(judge):
    """A wrong function: judge(ids, ids after the bug, the positions at which they differ)."""

    def wrong(conversations, pieces):
        found = []
        for ids in conversations:
            again = encode(decode(ids, pieces), pieces)
            differ = [i for i, (a, b) in enumerate(zip(ids, again)) if a != b]
            found.append(judge(ids, again, differ, pieces))
        return torch.tensor(found)

    return wrong


FIRST_WRONG_TOKENS = Exercise(
    "12.3",
    "first_wrong_tokens",
    cases=[
        # "abc" is ab, c when encoded, since ab comes first. It was sampled as ab, c, and as a, bc.
        Case(
            {"conversations": [[3, 2], [0, 4]], "pieces": ["a", "b", "c", "ab", "bc"]},
            torch.tensor([-1, 0]),
        ),
        # "cab" is c, ab when encoded: the first token is right in c, a, b. "ccabc" is c, c, ab, c; it was c, c, a, bc.
        Case(
            {"conversations": [[2, 0, 1], [2, 2, 0, 4]], "pieces": ["a", "b", "c", "ab", "bc"]},
            torch.tensor([1, 2]),
        ),
        # "abcab" is ab, c, ab; it was ab, c, a, b. The second is ab, ab.
        Case(
            {"conversations": [[3, 2, 0, 1], [3, 3]], "pieces": ["a", "b", "c", "ab", "bc"]},
            torch.tensor([2, -1]),
        ),
    ],
    random=random_texts,
    mistakes={
        "finds no difference: the texts are equal, the ids are not": of_each(lambda *_: -1),
        "compares numbers of tokens: a, bc and ab, c are equally many": of_each(
            lambda ids, again, differ, _: differ[0] if len(ids) != len(again) else -1
        ),
        "counts from 1: the first position is 0": of_each(
            lambda ids, again, differ, _: differ[0] + 1 if differ else -1
        ),
        "gives 0 where nothing differs: that is the first position": of_each(
            lambda ids, again, differ, _: differ[0] if differ else 0
        ),
        "gives the length where nothing differs: it is −1": of_each(
            lambda ids, again, differ, _: differ[0] if differ else len(ids)
        ),
        "is the last position that differs: from the first one on, the context is another": of_each(
            lambda ids, again, differ, _: differ[-1] if differ else -1
        ),
        "counts characters: tokens are asked for": of_each(
            lambda ids, again, differ, pieces: len(decode(ids[: differ[0]], pieces)) if differ else -1
        ),
        "says whether they differ: the position is asked for": of_each(lambda ids, again, differ, _: int(bool(differ))),
        "is the number of positions that differ": of_each(lambda ids, again, differ, _: len(differ) or -1),
    },
)


def random_calls(rng):
    things = ["lamp", "chair", "table"]
    needs = [*things[: drawn(rng, 1, 3)], "calculator"]
    known = [*things, "calculator", "error", ""]
    calls = ["calculator", *(known[drawn(rng, 0, len(known))] for _ in range(6)), *reversed(things), "calculator", ""]
    return {"calls": calls, "needs": needs, "bonus": 0.5, "cost": 0.1}


def paid(
    calls, needs, bonus, cost, *, again=False, early=False, in_order=False, error=1, repeated=1, silence=0, share=None
):  # fmt: skip
    """The right rewards, or those of another rule."""
    left, found = [*needs], []
    for call in calls:
        is_needed = call in left and (early or call != "calculator" or len(left) == 1)
        if is_needed and not (in_order and call != left[0]):
            found.append(bonus / (share or len(needs)))
            left = left if again else [one for one in left if one != call]
        else:
            is_repeated = call in needs and call not in left
            found.append(-cost * (error if call == "error" else repeated if is_repeated else 1 if call else silence))
    return torch.tensor(found)


def under(**rule):
    return lambda *arguments: paid(*arguments, **rule)


TWO_TOOLS_REWARDS = Exercise(
    "12.4",
    "two_tools_rewards",
    cases=[
        # One thing: 0.6 / 1; looked up again: −0.1; the answer is no call.
        Case({"calls": ["rug", "rug", ""], "needs": ["rug"], "bonus": 0.6, "cost": 0.1}, floats([0.6, -0.1, 0])),
        # 0.6 / 3 each. The first sum comes too early, the jar was not asked for, and a call failed.
        Case(
            {
                "calls": ["rug", "calculator", "jar", "error", "lamp", "calculator", ""],
                "needs": ["lamp", "rug", "calculator"],
                "bonus": 0.6,
                "cost": 0.1,
            },
            floats([0.2, -0.1, -0.1, -0.1, 0.2, 0.2, 0]),
        ),
    ],
    random=random_calls,
    mistakes={
        "the calculator is paid before all prices are known: its sum can only be a guess": under(early=True),
        "the same call is paid twice: repeating a search would be an easy income": under(again=True),
        "a repeated call costs nothing": under(repeated=0),
        "a failed call costs nothing": under(error=0),
        "a turn without a call costs as much as a needless call: the answer is one": under(silence=1),
        "searches are paid only in the order of needs: any order will do": under(in_order=True),
        "each needed call gets the whole bonus: then questions with more things pay more": under(share=1),
        "the bonus is divided by the number of turns, not by the number of needed calls": (
            lambda calls, *rest: paid(calls, *rest, share=len(calls))
        ),
        "all turns get the conversation's sum: a reward for each turn is asked for": (
            lambda calls, *rest: paid(calls, *rest).sum().repeat(len(calls))
        ),
    },
)

EXERCISES = [CONVERSATION_ROW, CONVERSATION_LOSS, FIRST_WRONG_TOKENS, TWO_TOOLS_REWARDS]
