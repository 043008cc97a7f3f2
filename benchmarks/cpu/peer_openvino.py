"""OpenVINO GenAI, as `cpu.peers` drives it: `PYTHON peer_openvino.py BASE ROWS [ADAPTER ...]`.

Runs in the environment that `install_peers.sh` makes. The base is exported once, in the parent of
its folder. Each request names its adapter in its own generation config, as the interface suggests;
`cpu.peers` checks the answers. `peer_wire` says what this program reads and answers.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import peer_wire

CACHE_GB = 1
STEP_TOKENS = 2048
ALPHA_OVER_RANK = 2.0


def main() -> None:
    """Answer until the input ends."""
    answer = peer_wire.answers()
    import numpy
    import openvino
    import openvino_genai as genai

    base, num_rows, *folders = sys.argv[1:]
    adapters = [genai.Adapter(f"{folder}/adapter_model.safetensors") for folder in folders]
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.max_num_batched_tokens = STEP_TOKENS
    scheduler.max_num_seqs = int(num_rows)
    scheduler.enable_prefix_caching = False
    options: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "bf16"}
    if adapters:
        options["adapters"] = genai.AdapterConfig(adapters)
    pipe = genai.ContinuousBatchingPipeline(str(export(Path(base))), scheduler, "CPU", options)
    answer("ready")
    for batch in peer_wire.batches():
        begin_s = time.perf_counter()
        handles = []
        for i, (prompt, adapter) in enumerate(zip(batch.prompts, batch.adapters, strict=True)):
            config = genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = batch.num_tokens
            config.ignore_eos, config.do_sample = True, False
            if adapter is not None:
                config.adapters = genai.AdapterConfig(adapters[adapter], ALPHA_OVER_RANK)
            ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
            handles.append(pipe.add_request(i, ids, config))
        outputs: list[list[int]] = [[] for _ in handles]
        while pipe.has_non_finished_requests():
            pipe.step()
            for output, handle in zip(outputs, handles, strict=True):
                while handle.can_read():
                    for part in handle.read().values():
                        output.extend(part.generated_ids)
        answer({"wall_s": time.perf_counter() - begin_s, "outputs": outputs})


def export(base: Path) -> Path:
    """By optimum, in the published precision."""
    target = base.with_name(f"{base.name}-openvino")
    if not target.exists():
        from optimum.intel import OVModelForCausalLM

        partial = target.with_suffix(".tmp")
        model = OVModelForCausalLM.from_pretrained(base, export=True, compile=False)
        model.save_pretrained(partial)
        partial.rename(target)
    return target


if __name__ == "__main__":
    main()
