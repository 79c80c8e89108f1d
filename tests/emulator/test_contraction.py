"""The compiler on a GPU fuses multiplications and additions; the softmax must not drift because of it."""

from __future__ import annotations

import re

import pytest

from flashsmith.generator.arch import ARCHS
from flashsmith.generator.families import families_for
from flashsmith.generator.rendering import render
from flashsmith.generator.spec import AttentionSpec


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_rescaling_of_an_unmoved_maximum_is_exactly_one(arch: str) -> None:
    # alpha = exp2(m_old * scale - m_new * scale) would become fma(m_old, scale, -rounded(m_new * scale)): not 0 but
    # the product's rounding error, applied anew at every tile. Of equal numbers the difference is 0 in any case.
    spec = AttentionSpec()
    for family in families_for(spec, ARCHS[arch]):
        text = render(spec, family.default_config(spec, ARCHS[arch]), ARCHS[arch], family=family).text
        alphas = re.findall(r"alpha\S* = (?:FIRST \? 1\.0f : )?ex2_approx_f32\((.*)\);", text)
        assert alphas
        assert all(re.fullmatch(r"\(m_i\S* - base\) \* scale_log2", alpha) for alpha in alphas), alphas
