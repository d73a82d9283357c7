"""Runs scripts in processes that have the libraries already: a run is ten seconds of imports shorter.

Python's forkserver imports them once, and each run is a fork of it. In the fork the script runs as it does from a
shell: as __main__, with a session, an environment and files for its output of its own. What runtime/ reads from the
environment when it is imported is not imported beforehand. Nor is a sitecustomize: Python reads it when it starts.
"""

import atexit
import gc
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARIES = [
    "datasets", "matplotlib.pyplot", "pydantic", "rich.table", "torch", "torch.distributed.checkpoint",
    "torch.distributed.fsdp", "torch.utils.tensorboard", "transformers", "transformers.models.llama.modeling_llama",
    "tyro", "vllm", "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker",
]  # fmt: skip
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
context = multiprocessing.get_context("forkserver")


def start_server():
    """Starts the process that imports the libraries, unless it runs already. It takes no time: it works beside us."""
    before = {name: os.environ.get(name) for name in QUIET}
    os.environ.update(QUIET)  # vLLM reads it when it is imported
    context.set_forkserver_preload(LIBRARIES)
    multiprocessing.forkserver.ensure_running()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


def run_here(words, environment, stdout, stderr, root):
    """What the fork does: becomes the command `python WORDS` in the folder root. stdout, stderr: paths of files."""
    gc.freeze()  # vLLM collects garbage often, and the 700,000 objects of the libraries are none
    os.setpgid(0, 0)  # so that a run that takes too long can be ended with all that it started
    os.environ.clear()
    os.environ.update(environment)
    for path, descriptor in ((stdout, 1), (stderr, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(root)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    sys.argv = list(words)
    sys.path[0:0] = [str(root)]
    try:
        runpy.run_path(words[0], run_name="__main__")
    except Exception:  # multiprocessing would print it without asking the hook
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # as Python does for a script, and multiprocessing does not


def run(words, processes=1, timeout=1200, env=None, root=ROOT, machines=1):
    """Runs `python WORDS` from the repository's root, or another folder, and returns it finished, with its output.

    words: the script and its flags; processes: more than one are connected as torchrun does it; machines: on how
    many they believe to be; timeout: in seconds. subprocess.TimeoutExpired after that; all its processes are dead then.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        ranks = [start(words, *files, (env or {}) | about, root) for about in places(processes, machines)]
        try:
            for rank in ranks:
                rank.join(timeout)
                if rank.exitcode is None:
                    raise subprocess.TimeoutExpired(words, timeout)
        finally:
            for rank in ranks:
                if rank.exitcode is None:
                    os.killpg(rank.pid, signal.SIGKILL)
                    rank.join()
        codes = [rank.exitcode for rank in ranks]
        stdout, stderr = (file.read_text(errors="replace") if file.exists() else "" for file in files)
    return subprocess.CompletedProcess(words, next((code for code in codes if code), 0), stdout, stderr)


def start(words, stdout, stderr, env=(), root=ROOT):
    """Begins to run `python WORDS`. Returns the process, as multiprocessing has it: with pid and exitcode."""
    start_server()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | dict(env)
    arguments = ([str(word) for word in words], environment, str(stdout), str(stderr), root)
    process = context.Process(target=run_here, args=arguments)
    process.start()
    return process


def places(processes, machines):
    """The environment variables that torchrun gives each of so many processes on so many machines."""
    if processes == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    here = processes // machines
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": here}
    ranks = [shared | {"RANK": rank, "LOCAL_RANK": rank % here} for rank in range(processes)]
    return [{name: str(value) for name, value in about.items()} for about in ranks]
