"""Define settings: types with ranges, and the settings that every script has.

A trainer's Args is a dataclass whose source is also its documentation, one line per field:

    # ---- objective
    clip_low: Fraction = 0.2  # ε_low
    clip_high: NonNegativeFloat = 0.24  # ε_high

The line with dashes opens a group of the help and of the header. The comment behind a field is its
help. The range is in its type: the help shows it, and check_ranges enforces it. flags.py says
where a setting's value comes from.
"""

import dataclasses
import typing
from typing import Annotated, Literal

import pydantic
import tyro

# ------------------------------------------------------------------------------- types with a range


def number(kind, words, **bounds):
    """Return int or float with a range. words: for the help; bounds: in pydantic's terms."""
    shown = tyro.conf.arg(metavar=f"{kind.__name__.upper()} {words}")
    return Annotated[kind, pydantic.Field(**bounds), shown]


# NaN and infinity are refused everywhere: no computation of a trainer makes sense with them.
FINITE = {"allow_inf_nan": False}
Fraction = number(float, "in [0, 1]", ge=0, le=1, **FINITE)
PositiveFraction = number(float, "in (0, 1]", gt=0, le=1, **FINITE)
LearningRate = PositiveFraction
PositiveInt = number(int, "greater than 0", gt=0)
# Below 2**32, because seeds have this type, and numpy, which vLLM seeds, takes no larger ones.
NonNegativeInt = number(int, "0 or greater, below 2**32", ge=0, le=2**32 - 1)
GroupSize = number(int, "in [1, 16384]", ge=1, le=16384)  # vLLM's limit for one prompt
PositiveFloat = number(float, "greater than 0", gt=0, **FINITE)
NonNegativeFloat = number(float, "0 or greater", ge=0, **FINITE)
Temperature = number(float, "0.01 or greater", ge=0.01, **FINITE)  # vLLM's minimum
EvaluationTemperature = NonNegativeFloat
Lag = PositiveInt
Dtype = Literal["bfloat16", "float16", "float32"]


def check_ranges(args) -> None:
    """Raise ValueError for the first setting outside its type's range. Changes nothing."""
    types = typing.get_type_hints(type(args), include_extras=True)
    for field in dataclasses.fields(args):
        name, value = field.name, getattr(args, field.name)
        try:
            # strict: refuse true and "5" as numbers, as a file may have them
            pydantic.TypeAdapter(types[name]).validate_python(value, strict=True)
        except pydantic.ValidationError as error:
            message = error.errors()[0]["msg"].replace("Input should", "it must")
            raise ValueError(f"--{name} is {value}; {message}") from None


# ----------------------------------------------------------------------------- what no paper sets


@dataclasses.dataclass
class CommonArgs:
    """The settings of every run that no algorithm reads. A trainer's Args adds its own."""

    # ---- problems
    data: str = ""  # training problems: a file, a folder or a hub id; empty: the task's
    test_data: str = ""  # test problems, given in the same ways
    people: str = "3-7"  # kk: numbers of people in a puzzle, within 2-8: "3-7" or "2,3"
    template_options: str = "{}"  # chat template's keywords, JSON: '{"enable_thinking": false}'

    # ---- machine
    micro_batch_tokens: PositiveInt = 16384  # tokens per forward pass; changes memory, not results
    gradient_checkpointing: bool = True  # recompute in the backward pass: slower, smaller
    compile: bool = True  # let torch.compile fuse the operations of a layer

    # ---- run
    eval_size: PositiveInt = 500  # number of test problems
    keep_checkpoints: PositiveInt = 3  # how many of the newest checkpoints stay on disk
    run_dir: str = ""  # where everything is written; empty: runs/SCRIPT_TASK_SEED_TIME
    resume: str = ""  # a run to continue, or one of its checkpoints; its settings are the defaults
    track: bool = False  # also log to Weights & Biases (pip install wandb)
    dry_run: bool = False  # check everything, estimate memory, show a prompt, load nothing, end

    # Values in scripts without these settings. They have no type, so they are not settings.
    responses_per_prompt = 1
    eval_samples = 1
    lag = 0
    kl_coef = 0.0
    teacher = None
    recurrent = False  # whether layers keep a state instead of keys and values; place sets it

    @property
    def has_sampler(self) -> bool:
        return hasattr(self, "temperature")  # sft.py samples nothing

    @property
    def has_critic(self) -> bool:
        return hasattr(self, "value_lr")  # ppo.py has one

    def check(self) -> None:
        """Raise ValueError if two settings contradict each other, as they can in some scripts."""


@dataclasses.dataclass
class RunArgs(CommonArgs):
    """Adds the settings that only scripts with a sampler read: all but sft.py."""

    # ---- problems
    numbers: str = "3-4"  # countdown: how many numbers in a puzzle, within 3-6: "3-4" or "5"
    operations: str = "1"  # calculator: how many in a problem, within 1-3: "1" or "2-3"
    gym: str = "letter_counting"  # gym: generators of reasoning-gym: "letter_counting,chain_sum"
    gym_options: str = "{}"  # gym: their parameters as JSON: '{"max_words": 3}'
    score_timeout: PositiveFloat = 60.0  # own task: seconds for a call of score(), then it is ended

    # ---- machine
    kv_cache_gb: PositiveFloat = 16.0  # GiB for the sampler's key-value cache, beside its weights
    sampler_dtype: Literal["", "int8", "fp8"] = ""  # round the sampler's weights; empty: --dtype

    # ---- run
    stop_at_gap: bool = True  # end the run if sampler and trainer compute different models


# ----------------------------------------------------------------------------- the papers' settings

TASKS = {
    "math": {  # AR-Lopti (arXiv 2505.12929), Section 5.2: a base model, not trained to chat
        "model": "Qwen/Qwen2.5-7B",
        "chat_template": "none",
        "epochs": 1,  # of Open-Reasoner-Zero's 57k problems; DSR-uniform's 10k: --epochs 5
        "prompts_per_step": 128,
        "temperature": 1.0,
    },
    "countdown": {  # ACPO (arXiv 2606.22570), Section 4.2, and the release's scripts
        "prompts_per_step": 128,
        "responses_per_prompt": 10,
        "max_response_tokens": 3072,
        "temperature": 1.0,
    },
    "hitab": {  # ACPO, Table 1b: a base model
        "model": "Qwen/Qwen2.5-3B",
        "chat_template": "none",
        "prompts_per_step": 128,
        "responses_per_prompt": 10,
        "max_response_tokens": 3072,
        "temperature": 1.0,
    },
}
