"""The examples and the benchmark scripts run: without a GPU where they can, else up to the launch."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers_attention import FakeBackend, qkv

from flashsmith.runtime.attention import use_backend


def run(*command):
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [("attention", ["out (1, ", "lse (1, ", "kernel: "]), ("masks_and_scores", ["changed by", "first document alone"])],
)
def test_examples(repo_root, name, words):
    printed = run(repo_root / "examples" / f"{name}.py")
    assert all(word in printed for word in words), printed


def test_the_host_cost_script_measures_every_call(repo_root):
    printed = run(repo_root / "benchmarks" / "host_cost.py", "--fake", "--calls", "20", "--json")
    found = json.loads(printed)
    costs = found["microseconds"]
    assert {"attention", "attention causal", "attention causal, LSE", "attention, mask_mod"} <= set(costs)
    assert {"attention (forward_sm80)", "attention causal (forward_sm80)", "torch.empty_like"} <= set(costs)
    assert all(0 < cost < 1000 for cost in costs.values())
    assert found["family"] == "forward_sm90" and list(found["parts"]) == ["forward_sm90", "forward_sm80"]
    for parts in found["parts"].values():
        assert {"check of q, k, v", "allocation of the output", "packing and launch"} <= set(parts)
        assert all(0 <= cost < 1000 for cost in parts.values())


def test_without_a_gpu_the_host_cost_script_says_so_in_one_line(repo_root):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    script = repo_root / "benchmarks" / "host_cost.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "--fake" in done.stderr


def test_the_harness_plug_in(repo_root, monkeypatch):
    harness = ModuleType("peers_bench")

    class Provider:
        suites = dtypes = ()

        def supports(self, c):
            if c["suite"] not in self.suites:
                return "suite not offered"
            return None if c["dtype"] in self.dtypes else f"no {c['dtype']}"

    harness.Provider = Provider  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "peers_bench", harness)
    path = repo_root / "benchmarks" / "flashsmith_provider.py"
    spec = importlib.util.spec_from_file_location("flashsmith_provider", path)
    assert spec is not None and spec.loader is not None
    plug_in = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plug_in)
    (kind,) = plug_in.PROVIDERS
    provider = kind()
    assert provider.load() and (provider.name, provider.layout) == ("flashsmith", "bshd")
    case = {"suite": "fwd", "dtype": "bf16", "layout": "contig", "causal": True}
    assert provider.supports(case) is None
    assert provider.supports({**case, "layout": "paged16"}) == "no paged KV"
    assert provider.supports({**case, "suite": "bwd"}) == "suite not offered"
    sets = [qkv(seed=seed, dtype=torch.bfloat16) for seed in range(2)]
    data = SimpleNamespace(**{name: [one[i] for one in sets] for i, name in enumerate("qkv")})
    backend = FakeBackend()
    with use_backend(backend):
        call = provider.build(case, data)
        assert call(1).shape == sets[1][0].shape
        provider.done()
    assert backend.launches[0].values["k"] == sets[1][1].data_ptr() and backend.launches[0].spec.mask is not None
    # Chunked prefill, grouped: fewer rows of Q than of K, causal from the bottom right.
    case |= {"suite": "gqa", "B": 2, "N": 33, "M": 47, "H": 4, "Hk": 2, "d": 64}
    q, k, v = qkv(b=2, sq=33, sk=47, h=4, hk=2, dtype=torch.bfloat16)
    assert provider.supports(case) is None
    with use_backend(backend):
        assert provider.build(case, SimpleNamespace(q=[q], k=[k], v=[v]))(0).shape == q.shape
    launch = backend.launches[-1]
    assert {n: launch.values[n] for n in ("seqlen_q", "seqlen_k", "group_size")} == {
        "seqlen_q": 33,
        "seqlen_k": 47,
        "group_size": 2,
    }
    assert launch.spec.mask is not None and launch.spec.mask.describe() == "kv_idx <= q_idx + (seqlen_k - seqlen_q)"
