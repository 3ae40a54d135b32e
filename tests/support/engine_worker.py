# SPDX-License-Identifier: Apache-2.0
"""Runs jobs on real engines, in a process that `support.engine` starts."""

import functools
import gc
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.engine_job import EngineResult, Round, RoundResult

#: vLLM's own counters; of histograms, the number of observations.
COUNTERS = (
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_draft_tokens",
    "kv_block_lifetime_seconds",
)


def serve(file_descriptor: int) -> None:
    """Answer each job, the arguments of `run_job`, with its result.

    A failure ends the process, with its traceback at the end of the log. So does an `EOFError`
    when there are no more jobs.
    """
    # vLLM's workers must not inherit the pipe, or the end of this process goes unnoticed.
    os.set_inheritable(file_descriptor, False)
    with Connection(file_descriptor) as jobs:
        while True:
            jobs.send(run_job(*jobs.recv()))
            gc.collect()  # Engines and their weights are full of cycles.


def run_job(model: Path, rounds: Sequence[Round], engine_args: dict[str, Any]) -> EngineResult:
    """Start an engine and run the rounds."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    prompts = [prompt for r in rounds for prompt in r.prompts if isinstance(prompt, dict)]
    if any("image" in prompt.get("multi_modal_data", {}) for prompt in prompts):
        replace_missing_torchvision()
    if engine_args["async_scheduling"]:
        allow_async_scheduling_on_cpu()
    llm = LLM(model=str(model), **engine_args)
    try:
        scheduler = getattr(in_process_core(llm), "scheduler", None)
        result = EngineResult() if scheduler is None else observe(scheduler)
        result.rounds = [run_round(llm, r) for r in rounds]
        result.own_metrics = own_metrics(llm)
        manager = getattr(scheduler, "kv_cache_manager", None)
        if hasattr(manager, "check_integrity"):
            # The class's method: this check is not one that `observe` counts.
            type(manager).check_integrity(manager)
        return result
    finally:
        # The next engine in this process starts from nothing.
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def in_process_core(llm: Any) -> Any:
    """The engine core; None if it runs in another process."""
    return getattr(llm.llm_engine.engine_core, "engine_core", None)


def observe(scheduler: Any) -> EngineResult:
    """An empty result, which counts what the scheduler does from now on."""
    manager = scheduler.kv_cache_manager
    result = EngineResult(
        scheduler=f"{type(scheduler).__module__}.{type(scheduler).__qualname__}",
        manager=f"{type(manager).__module__}.{type(manager).__qualname__}",
        num_groups=len(manager.kv_cache_config.kv_cache_groups),
    )

    def count_step() -> None:
        result.num_steps += 1
        result.peak_usage = max(result.peak_usage, manager.usage)

    def count_check() -> None:
        result.num_checks += 1

    def collect_events(batch: Any) -> None:
        result.events += map(repr, batch.events)

    call_before(manager, "new_step_starts", count_step)
    if hasattr(manager, "check_integrity"):
        call_before(manager, "check_integrity", count_check)
    call_before(scheduler.kv_event_publisher, "publish", collect_events)
    return result


@functools.cache
def allow_async_scheduling_on_cpu() -> None:
    """Keep base from disabling async scheduling on CPUs, where it calls it "not required".

    It works there, and is the only way to have several steps in flight without a GPU.
    """
    from vllm.platforms.cpu import CpuPlatform

    adjust = CpuPlatform.check_and_update_config

    def adjust_and_keep(vllm_config: Any) -> None:
        configured = vllm_config.scheduler_config.async_scheduling
        adjust(vllm_config)
        vllm_config.scheduler_config.async_scheduling = configured

    setattr(CpuPlatform, "check_and_update_config", staticmethod(adjust_and_keep))  # noqa: B010


@functools.cache
def replace_missing_torchvision() -> None:
    """Let base's Gemma 3 be imported without torchvision, which PyPI has no CPU build of.

    Base imports an image processor that needs torchvision, only to name it as a type.
    Transformers' image processor for Pillow, which is the one that runs, takes its place.
    """
    if importlib.util.find_spec("torchvision"):
        return
    from transformers import Gemma3ImageProcessorPil

    module: Any = SimpleNamespace(Gemma3ImageProcessor=Gemma3ImageProcessorPil)
    sys.modules.setdefault("transformers.models.gemma3.image_processing_gemma3", module)

    from vllm import ModelRegistry
    from vllm.model_executor.models.gemma3_mm import Gemma3ForConditionalGeneration

    # By its class: base inspects models that it knows by name in another process.
    ModelRegistry.register_model("Gemma3ForConditionalGeneration", Gemma3ForConditionalGeneration)


def call_before(instance: Any, method: str, call: Callable[..., None]) -> None:
    """Have a method call something else first, with the same arguments."""
    wrapped = getattr(instance, method)

    def wrapper(*args: Any) -> Any:
        call(*args)
        return wrapped(*args)

    setattr(instance, method, wrapper)


def run_round(llm: Any, spec: Round) -> RoundResult:
    if spec.reset_prefix_cache and not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache could not be reset")
    before = metrics(llm)
    params = [sampling_params(spec, i) for i in range(len(spec.prompts))]
    if llm.runner_type == "pooling":
        outputs = llm.embed(spec.prompts, use_tqdm=False)
    elif spec.arrivals or spec.aborts or spec.calls:
        outputs = drive(llm, spec, params)
    else:
        outputs = llm.generate(
            spec.prompts,
            params,
            priority=list(spec.priorities) or None,
            lora_request=spec.lora,
            use_tqdm=False,
        )
    after, core = metrics(llm), in_process_core(llm)
    return RoundResult(
        *map(list, zip(*map(describe, outputs), strict=True)),
        counters={name: int(after[name] - before[name]) for name in COUNTERS},
        # That of the last step where the manager is out of reach.
        usage=core.scheduler.kv_cache_manager.usage if core else after["kv_cache_usage_perc"],
    )


def sampling_params(spec: Round, index: int) -> Any:
    from vllm import SamplingParams

    num = [spec.max_tokens] if isinstance(spec.max_tokens, int) else spec.max_tokens
    sampling = {"temperature": 0.0, "ignore_eos": True} | dict(spec.sampling)
    # Log-probabilities are those of the sampled token only.
    return SamplingParams(max_tokens=num[index % len(num)], logprobs=0, **sampling)


def drive(llm: Any, spec: Round, params: Sequence[Any]) -> list[Any]:
    """Run the engine step by step, and return what each request had at its end or abort.

    Calls of the engine come first in a step, then arrivals, then aborts.
    """
    engine = llm.llm_engine
    arrivals = spec.arrivals or [0] * len(params)
    priorities = spec.priorities or [0] * len(params)
    outputs: dict[int, Any] = {}
    step = 0
    last_event = max([*arrivals, *spec.aborts.values(), *(call[0] for call in spec.calls)])
    while step <= last_event or engine.has_unfinished_requests():
        for _, method, arguments in (call for call in spec.calls if call[0] == step):
            getattr(llm, method)(**arguments)
        for i in (i for i, arrival in enumerate(arrivals) if arrival == step):
            engine.add_request(str(i), spec.prompts[i], params[i], priority=priorities[i])
        engine.abort_request([str(i) for i, abort in spec.aborts.items() if abort == step])
        if engine.has_unfinished_requests():
            outputs |= {int(output.request_id): output for output in engine.step()}
        step += 1
    # Aborts do not wait for the steps in flight that still hold their blocks.
    while getattr(in_process_core(llm), "batch_queue", None):
        engine.step()
    return [outputs.get(i) for i in range(len(params))]


def describe(output: Any) -> tuple[bool, list[int], list[float], str, int, list[float]]:
    """A request's part of a `RoundResult`; without output it was aborted before its first token."""
    if output is None:
        return False, [], [], "", 0, []
    if hasattr(output.outputs, "embedding"):
        return output.finished, [], [], "", 0, output.outputs.embedding
    completion = output.outputs[0]
    token_ids = list(completion.token_ids)
    steps = zip(token_ids, completion.logprobs or [], strict=True)
    logprobs = [of_step[token].logprob for token, of_step in steps]
    return output.finished, token_ids, logprobs, completion.text, output.num_cached_tokens, []


def own_metrics(llm: Any) -> dict[tuple[str, str], float]:
    """The plugin's metrics, those of blocks summed over their states."""
    totals: Counter[tuple[str, str]] = Counter()
    for m in llm.get_metrics() if llm.llm_engine.log_stats else ():
        if m.name.startswith("vllm:hybrid_kv_"):
            label = m.labels.get("reason", m.labels.get("attention_type", ""))
            totals[m.name.removeprefix("vllm:hybrid_kv_"), label] += m.value
    return dict(totals)


def metrics(llm: Any) -> Counter[str]:
    """vLLM's metrics, each summed over its labels; none with ``disable_log_stats``."""
    totals: Counter[str] = Counter()
    for m in llm.get_metrics() if llm.llm_engine.log_stats else ():
        if hasattr(m, "count") or hasattr(m, "value"):
            totals[m.name.removeprefix("vllm:")] += m.count if hasattr(m, "count") else m.value
    return totals
