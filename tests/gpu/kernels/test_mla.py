"""Latent attention on a GPU: kernels against their twins, models against transformers, CUDA graphs, full widths."""

from __future__ import annotations

import json
import time
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from baton.common.attention.mla.select import choose_latent_backend, choose_latent_decode_backend, latent_backend
from baton.common.attention.prefill_decode_backend import PrefillDecodeBackend
from baton.common.attention.workspace import AttentionWorkspace
from baton.common.config.mla import MLASpec
from baton.common.config.server import KernelArgs
from baton.common.forward.forward_batch import Row, build_forward_batch, model_input
from baton.common.kvcache.layout import KVLayout
from baton.common.kvcache.pool import KVPool
from baton.tests.bench.mla_decode import V2_LITE
from baton.tests.helpers.deepseek_models import YARN, save_deepseek
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.kernel_cases import check_cases
from baton.tests.helpers.small_models import expected_logits, forward, load_runner, scattered_pages, server_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0)
DEEPSEEK = MLASpec(q_lora_rank=None, kv_lora_rank=512, nope_dim=128, rope_dim=64, v_dim=128, scale=192**-0.5)
NUM_PAGES = 900


def test_kernels_equal_their_twins():
    check_cases("mla_cases.py")


@pytest.mark.parametrize("decode", ["triton", "flashinfer"])
@pytest.mark.parametrize("heads,expanded_mib", [(16, 256), (16, 1), (128, 256)])
def test_backends_agree_at_deepseeks_widths(heads, expanded_mib, decode):
    """Chunked extends, in one segment and in many, then a decode step; over pages of every layer of two groups."""
    if decode == "flashinfer" and find_spec("flashinfer") is None:
        pytest.skip("flashinfer is not installed")
    layout = KVLayout((2, 1), 1, DEEPSEEK.latent_dim, 16, "bfloat16", "latent")
    pools = [KVPool(layout, NUM_PAGES, CUDA) for _ in range(2)]
    triton = latent_backend("triton", pools[1], DEEPSEEK, heads, "bfloat16")
    triton._most_tokens = (expanded_mib << 20) // (heads * 256 * 2)
    split = PrefillDecodeBackend(triton, latent_backend(decode, pools[1], DEEPSEEK, heads, "bfloat16"))
    runs = [latent_backend("torch", pools[0], DEEPSEEK, heads, "bfloat16"), split]
    generator = torch.Generator(CUDA).manual_seed(9)
    table = torch.randn(600, 64, device=CUDA, generator=generator)
    up = (torch.randn(heads, 256, 512, device=CUDA, generator=generator) * 512**-0.5).bfloat16()
    prompts, chunk, workspace = [5, 400, 130], 150, AttentionWorkspace(CUDA)
    pages = np.random.default_rng(0).permutation(NUM_PAGES)[:3 * 26].reshape(3, 26)
    steps = [[(b, start, min(chunk, n - start)) for b, n in enumerate(prompts) if start < n]
             for start in range(0, max(prompts), chunk)]
    steps.append([(b, n, 1) for b, n in enumerate(prompts)])
    for rows in steps:
        batch = build_forward_batch([Row([0] * count, start, pages[b]) for b, start, count in rows], 16, CUDA)
        q = torch.randn(batch.num_tokens, heads, 192, device=CUDA, generator=generator).bfloat16()
        fused = torch.randn(batch.num_tokens, 576, device=CUDA, generator=generator).bfloat16()
        latent, k_rope = fused.split([512, 64], -1)
        plans = [backend.plan(batch, workspace) for backend in runs]
        for layer in range(3):
            want, got = (plan.run(layer, q.clone(), latent, k_rope, up, table) for plan in plans)
            torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)
    for want, got in zip(pools[0].groups, pools[1].groups):
        torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=1e-2)


def test_automatic_choice():
    assert choose_latent_backend("auto", CUDA) == "triton"
    assert choose_latent_decode_backend(KernelArgs(), CUDA, DEEPSEEK, "bfloat16", "bfloat16") == "triton"


@pytest.mark.parametrize("version", [2, 3])
def test_float32_logits_equal_transformers(tmp_path, version):
    model = save_deepseek(tmp_path, version, rope_parameters=YARN)
    runner = load_runner(server_config(tmp_path, backend="triton", dtype="float32"), device="cuda:0")
    tokens = np.random.default_rng(0).integers(0, 97, 60)
    pages = scattered_pages(runner, 1, 60)[0]
    want = expected_logits(model, tokens)
    got = [forward(runner, [(tokens[:37], 0, pages)]), forward(runner, [(tokens[37:59], 37, pages)]),
           forward(runner, [(tokens[59:], 59, pages)])]
    torch.testing.assert_close(torch.cat(got).cpu(), want, atol=1e-4, rtol=0)


def test_graphs_decode_the_same_tokens(tmp_path):
    """Requests of unequal lengths through replayed graphs, and through kernels launched one by one."""
    save_deepseek(tmp_path, 3)
    prompts = [np.random.default_rng(n).integers(0, 97, n).tolist() for n in (1, 40, 90, 17, 5)]
    found = []
    for kernels in (KernelArgs(disable_cuda_graph=True), KernelArgs(cuda_graph_max_bs=8)):
        engine = Engine(tmp_path, device="cuda", kernels=kernels)
        for i, prompt in enumerate(prompts):
            engine.start(str(i), prompt, max_new_tokens=10 + 7 * i, ignore_eos=True)
        found.append(tokens_of(engine.run()))
    assert found[0] == found[1] and len({tuple(tokens) for tokens in found[0].values()}) == 5


@pytest.mark.parametrize("options", [{"decode_attention_backend": "flashinfer"}, {"kv_cache_dtype": "fp8_e4m3"}],
                         ids=["flashinfer", "float8 latents"])
def test_decoding_otherwise_stays_close(tmp_path, options):
    """Of DeepSeek's widths in bfloat16, under CUDA graphs: most greedy tokens are the triton backend's."""
    if "decode_attention_backend" in options and find_spec("flashinfer") is None:
        pytest.skip("flashinfer is not installed")
    save_deepseek(tmp_path, 3, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
                  num_attention_heads=16, num_key_value_heads=16)
    prompts = [np.random.default_rng(n).integers(0, 97, n).tolist() for n in (1, 40, 90, 17, 5)]
    found = []
    for changed in ({}, options):
        kernels = {"cuda_graph_max_bs": 8, **{k: v for k, v in changed.items() if k != "kv_cache_dtype"}}
        engine = Engine(tmp_path, device="cuda", dtype="bfloat16", page_size=16, kernels=KernelArgs(**kernels),
                        kv_cache_dtype=changed.get("kv_cache_dtype", "auto"))
        for i, prompt in enumerate(prompts):
            engine.start(str(i), prompt, max_new_tokens=8, ignore_eos=True)
        found.append(tokens_of(engine.run()))
    pairs = [(a, b) for i in map(str, range(5)) for a, b in zip(found[0][i][:3], found[1][i][:3])]
    assert sum(a == b for a, b in pairs) >= 9, pairs  # once two differ, what follows them does


def test_v2_lite_shape_prefills_and_decodes(tmp_path, capsys):
    """Both phases at full width (fewer layers) within loose bounds; the measured times are printed."""
    (tmp_path / "config.json").write_text(json.dumps(V2_LITE | {"num_hidden_layers": 9}))
    runner = load_runner(server_config(tmp_path, backend="triton", load_format="dummy", max_total_tokens=200_000),
                         device="cuda:0")
    tokens = np.random.default_rng(0).integers(0, 100_000, 8192)
    pages = scattered_pages(runner, 64, 2064)
    cases = {"prefill of 8,192": [Row(tokens, 0, pages[:8].flatten())],
             "prefill of 256 behind 7,936": [Row(tokens[:256], 7936, pages[:8].flatten())],
             "decode of 64 x 2,048": [Row(tokens[:1], 2048, pages[b]) for b in range(64)]}
    seconds = {name: median_seconds(runner, rows) for name, rows in cases.items()}
    with capsys.disabled():
        print("\nV2-Lite, 9 layers: " + ", ".join(f"{name} {1e3 * found:.1f} ms" for name, found in seconds.items()))
    assert max(seconds.values()) < 2
    del runner
    torch.cuda.empty_cache()


def median_seconds(runner, rows: list[Row], repeats: int = 5) -> float:
    seconds = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        logits = runner.step(model_input(rows, runner.layout.page_size)).logits
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        assert logits.isfinite().all() and logits.std() > 0
    return sorted(seconds[1:])[repeats // 2]
