# SPDX-License-Identifier: Apache-2.0
"""Runs jobs on real engines in a process of its own; started by `support.engine`.

Reads one job a line (JSON) and writes one result a line, on two pipes whose file
descriptors are the arguments: standard output belongs to vLLM's log.
"""

import gc
import json
import os
import sys
from typing import Any


def main(read_fd: int, write_fd: int) -> None:
    # vLLM's workers must not inherit the pipes, or the end of this process goes unnoticed.
    os.set_inheritable(read_fd, False)
    os.set_inheritable(write_fd, False)
    with os.fdopen(read_fd) as jobs, os.fdopen(write_fd, "w") as results:
        for line in jobs:
            # A failure ends the process, with its traceback at the end of the log.
            results.write(json.dumps(run_job(json.loads(line))) + "\n")
            results.flush()
            gc.collect()  # Engines and their weights are full of cycles.


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM

    prompts = [prompt for spec in job["rounds"] for prompt in spec["prompts"]]
    if any("images" in prompt for prompt in prompts if isinstance(prompt, dict)):
        let_gemma3_see_without_torchvision()
    if job["args"].get("async_scheduling"):
        let_cpu_schedule_asynchronously()
    llm = LLM(model=job["model"], **job["args"])
    try:
        probe = Probe(llm)
        rounds = [run_round(llm, probe, r) for r in job["rounds"]]
        return {"rounds": rounds, "embeddings": embed(llm, job["texts"])} | probe.summary()
    finally:
        shut_down(llm)


def let_cpu_schedule_asynchronously() -> None:
    """Base switches async scheduling off on CPUs as "not required"; it runs there all
    the same, and is the only way to have several steps in flight without a GPU.
    """
    from vllm.platforms.cpu import CpuPlatform

    # Through vars(): as an attribute it would be bound, and could not be wrapped.
    adjust = vars(CpuPlatform)["check_and_update_config"].__func__
    if getattr(adjust, "keeps_async_scheduling", False):
        return

    def adjust_and_keep(cls: type, vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        adjust(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    vars(adjust_and_keep)["keeps_async_scheduling"] = True
    setattr(CpuPlatform, "check_and_update_config", classmethod(adjust_and_keep))  # noqa: B010


def let_gemma3_see_without_torchvision() -> None:
    """Base's Gemma 3 imports an image processor that needs torchvision, to name it as a type; the
    one that runs is transformers' other, for Pillow. Where there is no torchvision (it has no
    build on PyPI for CPUs alone), that one stands in, in this process.
    """
    import importlib.util
    import types

    if importlib.util.find_spec("torchvision"):
        return
    from transformers import Gemma3ImageProcessorPil

    name = "transformers.models.gemma3.image_processing_gemma3"
    stand_in = types.ModuleType(name)
    vars(stand_in)["Gemma3ImageProcessor"] = Gemma3ImageProcessorPil
    sys.modules.setdefault(name, stand_in)

    from vllm import ModelRegistry
    from vllm.model_executor.models.gemma3_mm import Gemma3ForConditionalGeneration

    # By its class: base looks at models that it knows by name in a process of its own.
    ModelRegistry.register_model("Gemma3ForConditionalGeneration", Gemma3ForConditionalGeneration)


class Probe:
    """Looks into the scheduler, where the engine core runs in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        core = getattr(llm.llm_engine.engine_core, "engine_core", None)
        self.scheduler = getattr(core, "scheduler", None)
        self.manager = getattr(self.scheduler, "kv_cache_manager", None)
        self.num_steps = self.num_checks = self.peak_usage = 0
        self.events: list[str] = []
        if self.manager is not None:
            self._count_steps_and_checks()
            self._collect_events()

    def _count_steps_and_checks(self) -> None:
        """Count the scheduler's steps, and the integrity checks that the fork makes in them."""
        new_step_starts = self.manager.new_step_starts

        def counted_step() -> None:
            self.num_steps += 1
            self.peak_usage = max(self.peak_usage, self.manager.usage)
            new_step_starts()

        self.manager.new_step_starts = counted_step
        check_integrity = getattr(self.manager, "check_integrity", None)
        if check_integrity is None:
            return

        def counted_check() -> None:
            check_integrity()
            self.num_checks += 1

        self.manager.check_integrity = counted_check

    def _collect_events(self) -> None:
        publisher = self.scheduler.kv_event_publisher
        publish = publisher.publish

        def collect_and_publish(batch: Any) -> None:
            self.events.extend(map(repr, batch.events))
            publish(batch)

        publisher.publish = collect_and_publish

    def usage(self) -> float:
        """Share of the KV cache in use; as of the last step where it is out of reach."""
        if self.manager is None:
            return metric(self.llm, "kv_cache_usage_perc")
        return self.manager.usage

    def summary(self) -> dict[str, Any]:
        if self.manager is None:
            return {}
        num_checks = self.num_checks
        if hasattr(self.manager, "check_integrity"):
            self.manager.check_integrity()
        return {
            "scheduler": type_name(self.scheduler),
            "manager": type_name(self.manager),
            "num_groups": len(self.manager.kv_cache_config.kv_cache_groups),
            "num_blocks": self.manager.kv_cache_config.num_blocks,
            "num_steps": self.num_steps,
            "num_checks": num_checks,
            "peak_usage": self.peak_usage,
            "events": self.events,
        }


def type_name(instance: Any) -> str:
    return f"{type(instance).__module__}.{type(instance).__qualname__}"


def run_round(llm: Any, probe: Probe, spec: dict[str, Any]) -> dict[str, Any]:
    if spec["reset_prefix_cache"] and not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache could not be reset")
    before = counters(llm)
    in_steps = spec["arrivals"] or spec["aborts"] or spec["calls"]
    generate = drive if in_steps else generate_all
    outputs = generate(llm, spec)
    return {
        "requests": [describe(output) for output in outputs],
        "counters": {name: value - before[name] for name, value in counters(llm).items()},
        "usage": probe.usage(),
    }


def sampling_params(spec: dict[str, Any], index: int) -> Any:
    from vllm import SamplingParams

    max_tokens = spec["max_tokens"]
    sampling = {"temperature": 0.0, "ignore_eos": True} | spec["sampling"]
    if "structured_outputs" in sampling:
        from vllm.sampling_params import StructuredOutputsParams

        sampling["structured_outputs"] = StructuredOutputsParams(**sampling["structured_outputs"])
    return SamplingParams(
        max_tokens=max_tokens[index % len(max_tokens)],
        logprobs=0,  # of the sampled token only
        **sampling,
    )


def prompt_of(prompt: Any, salt: str | None) -> Any:
    if isinstance(prompt, dict):
        make = illustrated_prompt if "images" in prompt else encoder_decoder_prompt
        return make(**prompt)
    content = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    return content | ({"cache_salt": salt} if salt else {})


def encoder_decoder_prompt(seed: int, num_samples: int, tokens: list[int]) -> Any:
    """See `support.engine_prompts.Noise`."""
    import numpy as np

    noise = np.random.default_rng(seed).standard_normal(num_samples).astype(np.float32)
    sound = {"audio": (noise, 16_000)}
    return {
        "encoder_prompt": {"prompt": "", "multi_modal_data": sound},
        "decoder_prompt": {"prompt_token_ids": tokens},
    }


def illustrated_prompt(text: str, images: list[int]) -> Any:
    """See `support.engine_prompts.Illustrated`."""
    import numpy as np
    from PIL import Image

    noises = [np.random.default_rng(seed).integers(0, 256, (64, 64, 3)) for seed in images]
    pictures = [Image.fromarray(noise.astype(np.uint8)) for noise in noises]
    return {"prompt": text, "multi_modal_data": {"image": pictures}}


def generate_all(llm: Any, spec: dict[str, Any]) -> list[Any]:
    """All prompts at once, as most users do."""
    prompts = spec["prompts"]
    return llm.generate(
        [prompt_of(p, spec["cache_salt"]) for p in prompts],
        [sampling_params(spec, i) for i in range(len(prompts))],
        priority=spec["priorities"] or None,
        lora_request=lora_request(spec["lora"]),
        use_tqdm=False,
    )


def lora_request(folder: str | None) -> Any:
    """For an adapter in a folder, by the folder's name."""
    if folder is None:
        return None
    from vllm.lora.request import LoRARequest

    name = os.path.basename(folder)
    return LoRARequest(name, lora_int_id=1 + sum(name.encode()) % 1000, lora_path=folder)


def drive(llm: Any, spec: dict[str, Any]) -> list[Any]:
    """Step by step: request ``i`` arrives before step ``arrivals[i]``, and is aborted
    before step ``aborts[i]`` if it has one. An aborted request's output is what it had.
    Before both come the step's calls of the engine.
    """
    engine, prompts = llm.llm_engine, spec["prompts"]
    arrivals = spec["arrivals"] or [0] * len(prompts)
    priorities = spec["priorities"] or [0] * len(prompts)
    aborts = {int(i): step for i, step in spec["aborts"].items()}
    outputs: dict[int, Any] = {}
    step = 0
    last_event = max([*arrivals, *aborts.values(), *(call[0] for call in spec["calls"])])
    while step <= last_event or engine.has_unfinished_requests():
        for _, method, arguments in (call for call in spec["calls"] if call[0] == step):
            getattr(llm, method)(**arguments)
        for i in (i for i, arrival in enumerate(arrivals) if arrival == step):
            engine.add_request(
                str(i),
                prompt_of(prompts[i], spec["cache_salt"]),
                sampling_params(spec, i),
                priority=priorities[i],
            )
        engine.abort_request([str(i) for i, abort in aborts.items() if abort == step])
        if engine.has_unfinished_requests():
            outputs |= {int(output.request_id): output for output in engine.step()}
        step += 1
    # Aborts do not wait for the steps in flight that still hold their blocks.
    core = getattr(engine.engine_core, "engine_core", None)
    while getattr(core, "batch_queue", None):
        engine.step()
    return [outputs.get(i) for i in range(len(prompts))]


def describe(output: Any) -> dict[str, Any]:
    """None is an output, too: of a request that was aborted before its first token."""
    if output is None:
        return {"finished": False, "token_ids": [], "logprobs": []}
    completion = output.outputs[0]
    token_ids = list(completion.token_ids)
    return {
        "finished": output.finished,
        "token_ids": token_ids,
        "logprobs": [
            step[token].logprob
            for token, step in zip(token_ids, completion.logprobs or [], strict=True)
        ],
        "text": completion.text,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
    }


COUNTERS = (
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_draft_tokens",
    "kv_block_lifetime_seconds",
)


def counters(llm: Any) -> dict[str, int]:
    """vLLM's own counters, of histograms the number; all 0 with ``disable_log_stats``."""
    return {name: int(metric(llm, name)) for name in COUNTERS}


def metric(llm: Any, name: str) -> float:
    if not llm.llm_engine.log_stats:
        return 0
    return sum(
        m.count if hasattr(m, "count") else m.value
        for m in llm.get_metrics()
        if m.name == f"vllm:{name}"
    )


def embed(llm: Any, texts: list[str]) -> list[list[float]]:
    if not texts:
        return []
    return [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]


def shut_down(llm: Any) -> None:
    """Stop the engine so that the next one in this process starts from nothing."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
