"""Sample responses to the problems of a suite with vLLM, in batches that a rerun can reuse."""

import fcntl
import gc
import hashlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

from transformers import AutoConfig, AutoTokenizer

from evaluation.models import fingerprint, short_name
from rewards import TaskError, converses, find_task, own
from runtime import chats, checks, distributed, memory, records, sampler, tools
from runtime.chats import check_replies, check_template, encode
from runtime.distributed import ON_GPU
from runtime.sampler import decode
from runtime.tools import encode_reply


def requests_of(model, problems, args) -> tuple:
    """Return (a request per problem, the plan: the engine's settings).

    A request has `prompt_ids`, `max_tokens`, `samples`, `temperature` and `seed`. ValueError if the
    model can't be loaded, a prompt exceeds its context, or a sequence exceeds the cache.
    """
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False, mistral_format=False)
    except Exception as error:  # the libraries raise many kinds
        raise ValueError(f"{model} can't be loaded: {error}") from error
    if not checks.quantisation_of(config):  # vLLM knows many kinds
        checks.check_weights("model", model, config)
    config = config.get_text_config()
    options = check_template(args, tokenizer)
    chats.fix_date(tokenizer, args.chat_template, model)  # a checkpoint's is that of its run
    prompts = [encode(tokenizer, problem, args.chat_template, options) for problem in problems]
    longest = max(map(len, prompts))
    most = getattr(config, "max_position_embeddings", math.inf)
    context = min(most, longest + args.max_response_tokens)
    if longest >= context:
        n = sum(len(ids) >= context for ids in prompts)
        raise ValueError(f"{model} takes {context} tokens, and {n} prompts have as many; the longest has {longest}")
    task = find_task(args.suite)
    talks = converses(task)
    requests = []
    for problem, ids in zip(problems, prompts):
        request = {
            "prompt_ids": ids,
            "max_tokens": min(args.max_response_tokens, context - len(ids)),
            "samples": problem["samples"],
            "temperature": problem["temperature"],
            "seed": problem["seed"],
        }
        if talks:
            request["problem"] = problem
        requests.append(request)
    plan = {
        "context": context,
        "dtype": args.dtype,
        "kv_cache_gb": cache_size(config, context, args),
        "batch": args.batch,
        "stop": sampler.end_tokens(model),
    }
    if talks:
        check_replies(task, tokenizer, args)  # ValueError if the template has no place for them
        plan["max_turns"] = args.max_turns
        plan["max_reply_tokens"], plan["tool_timeout"] = args.max_reply_tokens, args.tool_timeout
        plan["parser"] = getattr(task, "parser", [""])[0]
        plan["task"] = own.digest(task)  # its replies may change
        plan["chat"] = [args.chat_template, args.template_options]
    return requests, plan


def cache_size(config, context, args):
    """Return GiB for keys and values; None: all that a GPU has left. ValueError if one sequence needs more."""
    width = 4 if args.dtype == "float32" else 2  # bytes per number
    sequence = memory.key_value_bytes(config, width) * context / 2**30
    cache = args.kv_cache_gb
    if cache is None and not ON_GPU:
        cache = max(1.1 * sequence, min(2.0, args.batch * sequence))
    if cache is not None and cache < sequence:
        raise ValueError(f"--kv_cache_gb is {cache}; one sequence of {context} tokens already needs {sequence:.3f}")
    return cache


def load_engine(model, plan, seed):
    """Return a vLLM engine. Only one may exist at a time. plan: from requests_of."""
    options = sampler.common_options(str(model), plan["context"], plan["kv_cache_gb"])
    options |= sampler.attention(plan["dtype"])
    from vllm import LLM  # imported here: it reads the environment and takes seconds

    with distributed.library_notices():
        llm = LLM(model=model, dtype=plan["dtype"], seed=seed, **options)
    sampler.load_language_model(llm, model, plan["dtype"])
    return llm


def batches(requests, size):
    """Return lists of requests, in order; each ends with the request that brings it to `size` responses."""
    cut = []
    batch = []
    for request in requests:
        batch.append(request)
        if num_responses(batch) >= size:
            cut.append(batch)
            batch = []
    if batch:
        cut.append(batch)
    return cut


def num_responses(requests):
    return sum(request["samples"] for request in requests)


def sample(llm, task, batch, plan, title, done, total):
    """Sample a batch; return a list of responses per request.

    A response is {"response": its text, "tokens": how many, "truncated"}. If the task replies, it also has "turns" and
    "replies", and its text is the last turn. done, total: numbers of responses, for the progress bar of this title.
    """
    sampler.empty_prefix_cache(llm)  # a batch's responses must not depend on earlier batches
    bar = sampler.bar_with(title, initial=done, total=total)
    found = []
    going_on = []  # (the conversation, its last request, the response to that request)
    for request, responses in zip(batch, generate(llm, batch, plan, bar)):  # one per request
        rows = []
        for i, response in enumerate(responses):
            row = {"response": response.text, "tokens": len(response.token_ids)}
            row["truncated"] = response.finish_reason == "length"
            if "problem" in request:
                row |= {"turns": [response.text], "replies": []}
                further = request | {"samples": 1, "seed": sampler.request_seed(request["seed"], "turn 2", i)}
                side = tools.Side(task, request["problem"], sampler.request_seed(request["seed"], "task", i))
                going_on.append((Talk(row, side), further, response))
            rows.append(row)
        found.append(rows)
    talks = [talk for talk, *_ in going_on]
    while going_on:
        nexts = next_requests(llm, task, going_on, plan)
        requests = [request for _, request in nexts]
        bar = sampler.bar_with(f"{title}: the next turn of {len(nexts)} conversations")
        outputs = generate(llm, requests, plan, bar) if nexts else []
        going_on = []
        for (talk, request), [response] in zip(nexts, outputs):
            row = talk.row
            row["turns"].append(response.text)
            row["response"] = response.text
            row["tokens"] += len(response.token_ids)
            row["truncated"] = response.finish_reason == "length"
            going_on.append((talk, request, response))
    if failed := tools.most_failed(talks) or getattr(task, "failed", ""):
        raise TaskError(failed)  # so the batch is not kept
    if hasattr(task, "Conversation"):
        for talk, score in zip(talks, tools.scores_of_objects(talks, task.judge.seconds)):
            talk.row["score"] = score  # now, because the file of responses keeps no objects
    return found


class Talk:
    """A conversation as runtime/tools.py reads it. row: as in sample."""

    def __init__(self, row, side):
        self.row = row
        self.side = side
        self.turns = row["turns"]
        self.replies = row["replies"]

    @property
    def finish_reason(self) -> str:
        return "length" if self.row["truncated"] else "stop"


def generate(llm, requests, plan, bar):
    """Return vLLM's responses to each request, with their texts: a list of lists."""
    from vllm import SamplingParams

    prompts = []
    params = []
    for request in requests:
        prompts.append({"prompt_token_ids": request["prompt_ids"]})
        params.append(
            SamplingParams(
                n=request["samples"],
                max_tokens=request["max_tokens"],
                temperature=request["temperature"],
                seed=request["seed"],
                stop_token_ids=plan["stop"],
                detokenize=False,  # decode does it
            )
        )
    found = []
    for output in llm.generate(prompts, params, use_tqdm=bar):
        for response, text in zip(output.outputs, decode(llm.get_tokenizer(), output.outputs)):
            response.text = text
        found.append(output.outputs)
    return found


def next_requests(llm, task, going_on, plan):
    """Return (conversation, the request for its next turn) after the task's replies, for those that go on.

    going_on: (conversation, its last request, the response to it).
    """
    nexts = []
    going_on = [one for one in going_on if not one[0].row["truncated"]]
    tokenizer = llm.get_tokenizer()
    replies = tools.replies(task, [talk for talk, *_ in going_on], tokenizer, SimpleNamespace(**plan))
    for (talk, request, response), reply in zip(going_on, replies):
        if reply is None:
            continue
        talk.row["truncated"] = True  # unless the reply fits
        if len(talk.turns) == plan["max_turns"]:
            continue
        ids = encode_reply(tokenizer, reply, *plan["chat"], talk.turns[-1])
        left = request["max_tokens"] - len(response.token_ids) - len(ids)
        if left > 0:
            talk.row["truncated"] = False
            talk.replies.append("\n".join([reply] if isinstance(reply, str) else reply))
            further = request | {
                "prompt_ids": [*request["prompt_ids"], *response.token_ids, *ids],
                "max_tokens": left,
                "seed": sampler.request_seed(request["seed"], "next turn", 0),
            }
            nexts.append((talk, further))
    return nexts


def respond(model, task, requests, plan, args) -> tuple:
    """Return (the responses to all requests, in order; how they were made, for the results).

    Each complete batch becomes a line of OUT/responses/MODEL_DIGEST.jsonl. A rerun reads existing
    lines and samples the rest, in the same batches as an uninterrupted evaluation. The file's
    first line has everything that a response depends on: weights, requests, engine, seed, versions
    and machine. DIGEST is the digest of this line.
    """
    made = records.provenance()
    depends_on = {
        "model": fingerprint(model),
        "requests": hashlib.sha256(json.dumps(requests, default=str).encode()).hexdigest(),
        "engine": plan,
        "seed": args.seed,
        "versions": made["versions"],
        "machine": made["machine"],
    }
    first = json.dumps(depends_on, sort_keys=True).encode()
    name = f"{short_name(model)}_{hashlib.sha256(first).hexdigest()[:16]}.jsonl"
    path = Path(args.out, "responses", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    todo = batches(requests, args.batch)
    llm = None
    with open(path, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"error: another evaluation is writing {path}")
        except OSError:
            pass  # some network file systems have no locks
        kept = read_batches(file, first)
        if kept:
            print(f"{model}: {len(kept)} of {len(todo)} batches are in {path}")
        done = sum(map(num_responses, todo[: len(kept)]))
        for batch in todo[len(kept) :]:
            if llm is None:
                llm = load_engine(model, plan, args.seed)
            title = short_name(model)
            responses = sample(llm, task, batch, plan, title, done, num_responses(requests))
            done += num_responses(batch)
            kept.append({"made": made, "responses": responses})
            file.write(json.dumps(kept[-1]).encode() + b"\n")
            file.flush()
    if llm:
        llm.llm_engine.engine_core.shutdown()  # now, because the next model needs its memory
    del llm
    gc.collect()

    responses = []
    makers = []  # batches of one file may come from several commits
    for line in kept:
        responses += line["responses"]
        if line["made"] not in makers:
            makers.append(line["made"])
    about = {
        "path": model,
        "fingerprint": depends_on["model"],
        "responses": path.name,
        "engine": plan,
        "made": makers,
        "cut_by_context": sum(r["max_tokens"] < args.max_response_tokens for r in requests),
    }
    return responses, about


def read_batches(file, first) -> list:
    """Return the batches in a file of responses, and truncate the file after the usable part.

    An incomplete last line is unusable. If the first line differs, everything is.
    """
    file.seek(0)
    lines = file.read().split(b"\n")[:-1]
    if lines[:1] != [first]:
        lines = []
    file.truncate(sum(len(line) + 1 for line in lines))
    if not lines:
        file.write(first + b"\n")
    return [json.loads(line) for line in lines[1:]]
