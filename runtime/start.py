"""Begin a run: read all small inputs, check that the rest can work, and print the plan.

All of it happens before anything large is loaded.
"""

import sys

import rewards
from runtime import chats, checks, flags, header, inputs, memory, processes, records
from runtime.passes import HEAD_CHUNK


def begin(args_class, tasks, data=rewards):
    """Return (settings, Records, tokenizer, the task's module, training problems, test problems).

    args_class, tasks: a trainer's Args and TASKS; data: rewards.examples if the problems come with
    responses. Connects the processes, makes the run's folder and prints the header. An error that
    the user can fix ends the program with one line (exit code 2). --dry_run ends after the header.
    """
    with flags.errors_in_one_line():
        args, layers = flags.read_once(args_class, tasks, processes.ON_GPU)  # torch knows it
        tokenizer, task, train, test, sizes = prepare(args, data)
    if not args.dry_run:
        memory.keep_freed_memory()  # on a CPU, getting it again from the system is slow
        processes.start()
        records.choose_folder(args)
    if processes.RANK == 0:
        header.show(args, sizes, layers)
    if args.dry_run:
        sys.exit()
    return args, records.Records(args, sizes), tokenizer, task, train, test


def prepare(args, data=rewards):
    """Return (tokenizer, the task's module, training problems, test problems, sizes).

    sizes: a dictionary for the header and run.json. Sets args.steps if only --epochs is given.
    ValueError, saying what would be right, if something can't work.
    """
    flags.check_settings(args)
    checks.check_gpus(args)
    tokenizer, sizes = checks.check_model(args, HEAD_CHUNK)
    sizes["template_date"] = inputs.fix_date(tokenizer, args.chat_template, args.resume)
    task, train, test = chats.load_task(args, tokenizer, data)
    if len(train) < args.prompts_per_step:
        raise ValueError(
            f"--prompts_per_step is {args.prompts_per_step}, "
            f"but there are {len(train)} training problems"
        )
    if args.steps is None:
        args.steps = args.epochs * (len(train) // args.prompts_per_step)
    if hasattr(task, "parser"):
        names = ", ".join(tool.__name__ for tool in task.TOOLS)
        sizes["tools"] = f"{names}; calls are read by vLLM's parser {task.parser[0]}"
    sizes["training_problems"] = len(train)
    sizes["test_problems"] = len(test)
    sizes["digests"] = {"training": inputs.digest(train), "test": inputs.digest(test)}
    inputs.check_resumed(args, sizes["digests"])
    return tokenizer, task, train, test, sizes
