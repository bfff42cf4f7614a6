"""The peak operations per second of GPUs."""

import pytest

from composer.callbacks._flops import peak_flops
from composer.core import Precision


class TestPeakFlops:
    @pytest.mark.parametrize(
        ("name", "precision", "peak"),
        [
            ("NVIDIA A100-SXM4-40GB", "amp_bf16", 312e12),
            ("NVIDIA A100-SXM4-40GB", "amp_fp8", None),
            ("NVIDIA H100 80GB HBM3", "amp_bf16", 989.5e12),
            ("NVIDIA H100 80GB HBM3", "amp_fp8", 1979e12),
            ("NVIDIA H100 PCIe", "amp_fp16", 756.5e12),
            ("NVIDIA H200", "fp32", 67e12),
            ("NVIDIA A10", "amp_fp16", 125e12),
            ("NVIDIA A10G", "amp_fp16", None),
            ("NVIDIA L4", "amp_bf16", 121e12),
            ("NVIDIA L40S", "amp_bf16", 362e12),
            ("Tesla V100-SXM2-16GB", "amp_fp16", 125e12),
            ("Tesla V100-SXM2-16GB", "amp_bf16", None),
            ("Tesla V100-PCIE-16GB", "fp32", 14e12),
            ("NVIDIA GH200 480GB", "amp_bf16", None),
            ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "amp_bf16", None),
        ],
    )
    def test_peak_by_device_and_precision(self, name, precision, peak):
        """Each device's peak in each precision; None if unknown."""
        assert peak_flops(name, Precision(precision)) == peak
