"""A process for vLLM alone, which samples while the trainer computes (grpo_async.py).

It has a GPU of its own, or a part of the CPU's cores. Trainer and sampler talk through a pipe:
requests go one way, responses the other. Tensors in a request are not copied: both processes map
the same shared memory (torch.multiprocessing). If either process dies, the other one notices.
"""

import atexit
import contextlib
import multiprocessing
import os
import queue
import re
import resource
import shutil
import signal
import threading
from multiprocessing.connection import wait

import torch
import torch.multiprocessing  # teaches pipes to send tensors as handles of shared memory

from runtime import processes, threads
from runtime.ranks import LOCAL_RANK, LOCAL_WORLD_SIZE

PATIENCE = 10  # seconds until a sampler that was told to end is killed
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
# A sampler that ends with its trainer leaves a semaphore of vLLM's, and Python would say so last.
ALONE |= {"PYTHONWARNINGS": "ignore:resource_tracker:UserWarning"}


class SamplerProcess:
    """Starts the process. In it serve(args, next_request, answer) answers requests in order.

    next_request() waits for what request() was given; answer(when, value) sends what receive(when)
    returns. serve runs until the trainer ends, or calls end().
    """

    def __init__(self, serve, args):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each shared tensor needs one
        context = multiprocessing.get_context("spawn")
        self.pipe, other_end = context.Pipe()
        self.answers = {}  # those that arrived before receive asked for them
        self.cores, self.num_threads = os.sched_getaffinity(0), torch.get_num_threads()
        self.process = context.Process(target=run, args=(serve, args, other_end))
        with place_of_sampler(args):
            self.process.start()
        other_end.close()  # so that a read fails when the sampler has died
        atexit.register(self.end)

    def request(self, *values):
        """Sends a request. If the sampler is dead, receive says so."""
        with contextlib.suppress(OSError):
            self.pipe.send(values)

    def receive(self, when):
        """Waits for the answer named `when`. None if the sampler of any process has died."""
        with contextlib.suppress(EOFError, OSError):
            while when not in self.answers:
                name, value = self.pipe.recv()
                self.answers[name] = value
        answer = self.answers.pop(when, None)
        return None if processes.all_reduce(answer is None) else answer

    def how_it_ended(self):
        """How the process has ended, in words: "by SIGKILL" …"""
        wait([self.process.sentinel], timeout=PATIENCE)
        code = self.process.exitcode
        if code is None:
            return "in another process of the run"
        if code < 0:
            return f"by {signal.Signals(-code).name}"
        return f"with exit code {code}"

    def end(self):
        """Ends the process, whatever it does, and takes all cores again."""
        self.pipe.close()  # it ends when it finds no trainer at the other end
        self.process.join(PATIENCE)
        self.process.kill()
        self.process.join()
        os.sched_setaffinity(0, self.cores)
        torch.set_num_threads(self.num_threads)
        atexit.unregister(self.end)


def run(serve, args, pipe):
    """What the new process does."""
    # A Ctrl-C reaches this process as well, and a batch system's SIGTERM may. The trainer's step
    # still needs the responses.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.environ["TQDM_DISABLE"] = "1"  # the bars in the terminal are the trainer's
    requests = queue.SimpleQueue()
    threading.Thread(target=read, args=(pipe, requests), daemon=True).start()
    serve(args, requests.get, lambda when, value: pipe.send((when, value)))


def read(pipe, requests):
    """Takes requests from the pipe at once, so that request never waits; ends with the trainer."""
    trainer = os.getppid()
    with contextlib.suppress(EOFError, OSError):
        while os.getppid() == trainer:
            if pipe.poll(1):
                requests.put(pipe.recv())
    os._exit(0)


# ------------------------------------------------------------------------------------ its own place


@contextlib.contextmanager
def place_of_sampler(args):
    """A process that is started in its block gets the sampler's GPU, or its part of the cores.

    Afterwards this process has the other cores alone.
    """
    variables = dict(ALONE)
    cores = sorted(os.sched_getaffinity(0))
    for_trainers = cores
    if processes.ON_GPU:
        variables["CUDA_VISIBLE_DEVICES"] = gpus(args)[LOCAL_RANK]
    elif len(cores) >= 2 * LOCAL_WORLD_SIZE:
        number = LOCAL_WORLD_SIZE if threads.is_small(args.model) else len(cores) // 2
        for_trainers, for_samplers = cores[:-number], cores[-number:]
        os.sched_setaffinity(0, for_samplers[LOCAL_RANK::LOCAL_WORLD_SIZE])
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        os.sched_setaffinity(0, for_trainers)
        if not processes.ON_GPU:
            torch.set_num_threads(len(processes.own_cores()))


def gpus(args):
    """The samplers' GPUs, as CUDA_VISIBLE_DEVICES names them: one for each process here.

    ValueError if there are too few.
    """
    there = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if there == [""]:
        there = [str(number) for number in range(torch.cuda.device_count())]
    chosen = list(range(LOCAL_WORLD_SIZE, 2 * LOCAL_WORLD_SIZE))
    if args.sampler_gpus:
        chosen = [int(number) for number in args.sampler_gpus.split(",")]
    if len(chosen) != LOCAL_WORLD_SIZE or max(chosen) >= len(there):
        raise ValueError(
            f"the samplers of {LOCAL_WORLD_SIZE} process(es) need a GPU each, beside the trainers' "
            f"(0 to {LOCAL_WORLD_SIZE - 1}). This machine has {len(there)}, and --sampler_gpus is "
            f"{args.sampler_gpus!r}. With one GPU, --sampler_gpus 0 lets both share it, if their "
            "memory fits; grpo_stale.py makes the same responses without a second GPU"
        )
    return [there[number] for number in chosen]


def check(args, num_parameters):
    """ValueError if the sampler has no GPU, or the shared memory can't hold the weights.

    Nothing happens in a script without a process for the sampler.
    """
    if not hasattr(args, "sampler_gpus"):
        return
    if not re.fullmatch(r"(\d+(,\d+)*)?", args.sampler_gpus):
        raise ValueError(f"--sampler_gpus is {args.sampler_gpus!r}; it must be numbers, as in 2,3")
    if processes.ON_GPU:
        gpus(args)
    each = num_parameters * getattr(torch, args.dtype).itemsize
    needed = (args.lag + 1) * LOCAL_WORLD_SIZE * each / 2**30
    free = shutil.disk_usage("/dev/shm").free / 2**30
    if needed > free:
        raise ValueError(
            f"{args.lag + 1} versions of the weights need {needed:.2f} GiB of shared memory, and "
            f"/dev/shm has {free:.2f} free: give a container more (docker run --shm-size), or take "
            "a smaller --lag or --model"
        )
