"""What a script does before it imports torch, which takes seconds: refuse what can't work.

Nothing that this module imports may import torch.
"""

import sys
from pathlib import Path

from rewards import check_options, find_task
from runtime import checks, defaults, files, folders, settings, signals, streams, threads
from runtime.chats import read_template_options
from runtime.ranks import RANK, check_meeting_place


def check(args_class, tasks):
    """Ends the program with one line (exit code 2) if a setting, a folder or a task can't be right.

    With --help it ends with the help. args_class, tasks: a script's Args and TASKS. Nothing happens
    if the script is imported by another program.
    """
    if args_class.__module__ != "__main__":
        return
    streams.keep_writing()
    check_meeting_place()
    signals.end_while_loading()
    with settings.errors_in_one_line():
        args, _ = defaults.read(sys.argv[1:], args_class, tasks)
        check_settings(args)
        # Process 0 alone: two that look at the same time would see each other.
        if RANK == 0 and (args.resume or args.run_dir):
            files.check_unlocked(folders.run_of(args.resume or args.run_dir))
        threads.choose_waiting(args.model)
    if RANK == 0:
        what = "torch; no model" if args.dry_run else "torch and the model; this takes a while"
        print(f"{Path(sys.argv[0]).name}: loading {what}", flush=True)


def check_settings(args):
    """ValueError, saying what would be right, if a setting, a folder or a task can't be right."""
    args.check()
    find_task(args.task)
    check_options(args)
    read_template_options(args)
    checks.check_prompts_per_step(args)
    checks.check_eval_samples(args)
    checks.check_lora(args)
    checks.check_kl(args)
    checks.check_run_folders(args)
    checks.check_model_folder(args.model)
    if args.has_sampler:
        checks.check_weights_files(args.model)
    checks.check_teacher(args)
    checks.check_data_files(args)
