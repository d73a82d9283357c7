"""Run vLLM in a process of its own, which samples while the trainer computes (grpo_async.py).

It has its own GPU, or a part of the CPU's cores. Trainer and sampler talk through a pipe:
requests go one way, responses the other. Tensors in a request are not copied: both processes map
the same shared memory (torch.multiprocessing). If either process dies, the other one notices.
"""

import atexit
import contextlib
import multiprocessing
import os
import queue
import resource
import shutil
import signal
import threading

import torch
import torch.multiprocessing  # lets pipes send tensors as handles of shared memory

from runtime import distributed, machine
from runtime.machine import LOCAL_RANK, LOCAL_WORLD_SIZE

PATIENCE = 10  # seconds until a sampler that was told to end is killed
LONGEST_WAIT = 3600  # seconds without an answer after which a sampler counts as dead
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
# A sampler that ends with its trainer leaves a semaphore of vLLM's; hide Python's warning.
ALONE |= {"PYTHONWARNINGS": "ignore:resource_tracker:UserWarning"}


class SamplerProcess:
    """Starts a process, in which serve(args, next_request, answer) answers requests in order.

    next_request() waits for the arguments of a request(); answer(when, value) sends the value that
    receive(when) returns. serve runs until the trainer ends, or calls end().
    """

    def __init__(self, serve, args):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one per shared tensor
        context = multiprocessing.get_context("spawn")
        self.pipe, other_end = context.Pipe()
        self.arrived = queue.SimpleQueue()  # (name, value) of each answer; None: the sampler died
        self.answers = {}  # answers that arrived before receive asked for them
        self.process = context.Process(target=run, args=(serve, args, other_end))
        with place_of_sampler(args):
            self.process.start()
        other_end.close()  # so that reads fail once the sampler is dead
        # Read answers at once. A pipe holds 256 KiB: the sampler would wait until receive reads.
        threading.Thread(target=collect, args=(self.pipe, self.arrived), daemon=True).start()
        atexit.register(self.end)

    def request(self, *values) -> None:
        """Send a request. If the sampler is dead, receive says so."""
        with contextlib.suppress(OSError):
            self.pipe.send(values)

    def receive(self, when):
        """Wait for the answer named `when`. None if the sampler of any process has died."""
        with contextlib.suppress(queue.Empty):
            while when not in self.answers:
                answer = self.arrived.get(timeout=LONGEST_WAIT)
                if answer is None:
                    self.arrived.put(None)  # for later calls
                    break
                name, value = answer
                self.answers[name] = value
        answer = self.answers.pop(when, None)
        return None if distributed.all_reduce(answer is None) else answer

    def how_it_ended(self) -> str:
        """Say how the process ended. -9: by SIGKILL; None: it was that of another process."""
        self.process.join(PATIENCE)
        if self.process.exitcode is None and self.process.is_alive():
            return f"gave no answer for {LONGEST_WAIT // 60} minutes, here or in another process"
        return f"ended with exit code {self.process.exitcode}"

    def end(self) -> None:
        """End the process, whatever it is doing."""
        self.request()  # an empty request: the sampler ends at once
        self.process.join(PATIENCE)
        self.process.kill()


def run(serve, args, pipe) -> None:
    """Serve requests in the new process."""
    # Ctrl-C also reaches this process, and a batch system's SIGTERM may. Ignore both: the trainer
    # still needs the responses of its step.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.environ["TQDM_DISABLE"] = "1"  # only the trainer shows bars
    requests = queue.SimpleQueue()
    threading.Thread(target=read, args=(pipe, requests), daemon=True).start()
    serve(args, requests.get, lambda when, value: pipe.send((when, value)))


def read(pipe, requests) -> None:
    """Read requests from the pipe at once, so that request never waits; end with the trainer."""
    trainer = os.getppid()
    with contextlib.suppress(EOFError, OSError):
        while os.getppid() == trainer:
            if pipe.poll(1):
                request = pipe.recv()
                if not request:  # the trainer ends
                    break
                requests.put(request)
    os._exit(0)


def collect(pipe, arrived) -> None:
    """Put the sampler's answers into a queue of the trainer, as they come; None after the last."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            arrived.put(pipe.recv())
    arrived.put(None)


# ------------------------------------------------------------------------------------ its own place


@contextlib.contextmanager
def place_of_sampler(args):
    """Give a process that is started in this block the sampler's GPU, or its part of the cores.

    Afterwards this process uses only the other cores.
    """
    variables = dict(ALONE)
    cores = sorted(os.sched_getaffinity(0))
    for_trainers = cores
    if distributed.ON_GPU:
        variables["CUDA_VISIBLE_DEVICES"] = gpus(args)[LOCAL_RANK]
    elif len(cores) >= 2 * LOCAL_WORLD_SIZE:
        number = LOCAL_WORLD_SIZE if machine.is_small_model(args.model) else len(cores) // 2
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
        if not distributed.ON_GPU:
            torch.set_num_threads(len(distributed.own_cores()))


def check(args, model) -> None:
    """Raise ValueError if the sampler has no GPU, or /dev/shm can't hold the shared snapshots."""
    if distributed.ON_GPU:
        gpus(args)
    # A weight that embedding and head share is in a snapshot twice.
    n_params = sum(weight.numel() for _, weight in model.named_parameters(remove_duplicate=False))
    snapshot = n_params * getattr(torch, args.dtype).itemsize / 2**30
    needed = LOCAL_WORLD_SIZE * (args.lag + 1) * snapshot
    free = shutil.disk_usage("/dev/shm").free / 2**30
    if needed > free:
        raise ValueError(
            f"trainer and sampler share {args.lag + 1} snapshots of the weights, which take "
            f"{needed:.2f} GiB of /dev/shm, and {free:.2f} are free there: give a container more "
            "(`docker run --shm-size`), or take a smaller --lag or --model"
        )


def gpus(args) -> list:
    """Return the samplers' GPUs, as CUDA_VISIBLE_DEVICES names them: one per process here.

    ValueError if there are too few.
    """
    there = [str(number) for number in range(torch.cuda.device_count())]
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        there = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    chosen = range(LOCAL_WORLD_SIZE, 2 * LOCAL_WORLD_SIZE)
    if args.sampler_gpus:
        numbers = args.sampler_gpus.split(",")
        chosen = [int(n) if n.strip().isdigit() else len(there) for n in numbers]
    if len(chosen) != LOCAL_WORLD_SIZE or max(chosen) >= len(there):
        raise ValueError(
            f"--sampler_gpus {args.sampler_gpus!r}: {LOCAL_WORLD_SIZE} sampler(s) need one of "
            f"{len(there)} GPUs each, beside the trainers': with one GPU, --sampler_gpus 0 lets "
            "both share it; grpo_stale.py needs no second one"
        )
    return [there[number] for number in chosen]
