"""Layers in host memory on a GPU: the tokens of a model without, by eager steps, by graphs and with steps in flight,
and the rate at which weights arrive, beside that of a plain copy."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from baton.common.config.server import KernelArgs, OffloadArgs
from baton.tests.helpers.deepseek_models import save_deepseek
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.small_models import save_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 9, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 512}
PROMPTS = [[(7 * i + count) % 97 for i in range(count)] for count in (3, 20, 41, 8, 130)]
ALL = OffloadArgs(offload_group_size=1)
SOME = OffloadArgs(offload_group_size=3, offload_num_in_group=2, offload_prefetch_step=2)
LEAST_SHARE_OF_COPY_RATE = 0.8


def answers(engine: Engine) -> list[list[int]]:
    for rid, prompt in enumerate(PROMPTS):
        engine.start(str(rid), prompt, max_new_tokens=24)
    found = tokens_of(engine.run())
    return [found[str(rid)] for rid in range(len(PROMPTS))]


@pytest.mark.parametrize(("family", "flags"), [
    ("Qwen3", {"dtype": "float32"}), ("Qwen3", {"dtype": "bfloat16"}), ("Qwen3", {"dtype": "bfloat16",
                                                                                 "quantization": "fp8"}),
    ("DeepseekV3", {"dtype": "float32"})], ids=lambda value: value if isinstance(value, str) else ",".join(
        value.values()))
def test_tokens_equal_those_of_a_resident_model(tmp_path, family, flags):
    """The same kernels compute on the same bits, so that no token may differ, whichever buffers they come from."""
    if family == "Qwen3":
        save_model(tmp_path, "Qwen3", **SIZES)
    else:
        save_deepseek(tmp_path, 3, num_hidden_layers=7)

    def found(**options: Any) -> list[list[int]]:
        return answers(Engine(tmp_path, page_size=16, device="cuda", **flags, **options))

    # FlashInfer's kernels, which 16-bit models have by default, compile for minutes.
    triton = {"attention_backend": "triton"}
    for options in ({"kernels": KernelArgs(**triton, disable_cuda_graph=True)}, {"kernels": KernelArgs(**triton)},
                    {"kernels": KernelArgs(**triton), "overlap": True}):
        wanted = found(**options)
        for offload in (ALL, SOME):
            assert found(offload=offload, **options) == wanted, (options, offload)


def test_updates_and_released_memory(tmp_path):
    """Graphs that were captured before replay with the weights that came later, and are captured again."""
    save_model(tmp_path / "first", "Qwen3", **SIZES)
    model = save_model(tmp_path / "second", "Qwen3", **SIZES)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(parameter.flip(0))
    model.save_pretrained(tmp_path / "second")
    wanted = [answers(Engine(tmp_path / name, page_size=16, device="cuda", radix=False))
              for name in ("first", "second")]
    engine = Engine(tmp_path / "first", page_size=16, device="cuda", radix=False, offload=ALL)
    assert answers(engine) == wanted[0]
    engine.runner.update_weights(str(tmp_path / "second"), None)
    assert answers(engine) == wanted[1] != wanted[0]
    engine.runner.release(["weights"])
    engine.runner.resume(["weights"], complete=True)
    assert answers(engine) == wanted[1]


def test_weights_arrive_at_the_rate_of_copies(tmp_path):
    """A decode step of a model all of whose layers are in host memory takes as long as a copy of them, give or take:
    the bus is the ceiling. 12 layers of 101 MB."""
    save_model(tmp_path, "Qwen3", **SIZES | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 1,
                                             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128})
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 1', '"num_hidden_layers": 12').replace(
        '"max_window_layers"', '"_max_window_layers"').replace('"layer_types"', '"_layer_types"'))
    engine = Engine(tmp_path, page_size=16, device="cuda", dtype="bfloat16", load_format="dummy", offload=ALL,
                    kernels=KernelArgs(attention_backend="triton"))
    ring = engine.runner._model._stack._ring
    assert ring is not None
    num_bytes = sum(map(len, ring._sources))
    copy_rate = num_bytes / min(seconds_of(lambda: [
        ring._buffers[i % 2][:len(source)].copy_(source, non_blocking=True)
        for i, source in enumerate(ring._sources)]) for _ in range(5))

    def decode(count: int) -> float:
        engine.start(f"of {count}", PROMPTS[1], max_new_tokens=count)
        return seconds_of(engine.run)

    decode(8)
    step = (decode(72) - decode(8)) / 64
    print(f"{num_bytes / 1e9:.2f} GB a step of {1e3 * step:.1f} ms: {num_bytes / step / 1e9:.1f} GB/s, a copy "
          f"{copy_rate / 1e9:.1f} GB/s")
    assert num_bytes / step >= LEAST_SHARE_OF_COPY_RATE * copy_rate


def seconds_of(work: Any) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin
