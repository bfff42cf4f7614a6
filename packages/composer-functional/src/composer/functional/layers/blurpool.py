"""Layers that blur before they subsample (Zhang 2019, arXiv:1904.11486)."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, max_pool2d, pad

from composer.functional.checks import check_flags, check_float_tensors, check_pixels, check_tensors, check_whole


def blur_2d(
    input: Tensor, channels: int = -1, stride: int | tuple[int, ...] = 1, filter: Tensor | None = None
) -> Tensor:
    """Blur each channel with a filter, then subsample (arXiv:1904.11486).

    The input is padded with zeros, so that the output has the size ``floor((size - 1) / stride) + 1``.

    Args:
        input: Images, shape ``(N, C, H, W)`` or ``(C, H, W)``, floating point.
        channels: ``C``, which is read from ``input`` if it is -1.
        stride: The stride of the subsampling, one number or (rows, columns).
        filter: The filter, shape ``(1, 1, rows, columns)``, or ``(C, 1, rows, columns)`` for one of each channel, with
            odd numbers of rows and columns. The binomial filter ``[1, 2, 1] x [1, 2, 1] / 16`` if ``None``.

    Returns:
        A new tensor with the dtype and memory format of ``input``.

    Raises:
        TypeError: ``input`` is not floating point, or ``stride`` is not one or two ints.
        ValueError: ``channels`` is neither -1 nor ``C``; or the filter has another shape.

    Example:
        >>> blur_2d(torch.ones(1, 1, 3, 3))[0, 0]
        tensor([[0.5625, 0.7500, 0.5625],
                [0.7500, 1.0000, 0.7500],
                [0.5625, 0.7500, 0.5625]])
    """
    check_float_tensors(input=input)
    check_whole("channels", channels)
    check_pixels(stride=stride)
    if input.ndim not in {3, 4} or channels not in {-1, input.shape[-3]}:
        wanted = "C" if channels == -1 else channels
        raise ValueError(
            f"input must have shape (N, {wanted}, H, W) or ({wanted}, H, W), got {tuple(input.shape)}. "
            "channels is the number of channels, or -1 for any."
        )
    if filter is None:
        filter = _binomial(input)
    check_tensors(filter=filter)
    if (
        filter.ndim != 4
        or filter.shape[0] not in {1, input.shape[-3]}
        or filter.shape[1] != 1
        or not all(size % 2 for size in filter.shape[2:])
    ):
        raise ValueError(
            f"filter must have shape (1, 1, rows, columns) or ({input.shape[-3]}, 1, rows, columns) with odd rows and "
            f"columns, got {tuple(filter.shape)}."
        )
    return _blur(input, filter, _pair(stride))


def _binomial(like: Tensor) -> Tensor:
    # 1/4, 1/2 and 1/4, computed on the device: a copy from the host would wait for it.
    row = 0.5 - torch.arange(-1, 2, dtype=like.dtype, device=like.device).abs() / 4
    return torch.outer(row, row)[None, None]


def _blur(input: Tensor, filter: Tensor, stride: tuple[int, int]) -> Tensor:
    # A depthwise convolution with implicit zero padding is fastest. Forward and backward of (16, 64, 56, 56)
    # with stride 1 on one thread, contiguous / channels last, in ms: this 6.4 / 3.6; padded by F.pad 11 / 5.6;
    # avg_pool2d with kernel 2 twice 67 / 5.7; slices added by rows, then columns (the better of two ways) 17 / 27;
    # channels folded into the batch 326 / 338. With stride 2: 3.1 / 1.4; 8.2 / 3.2; 42 / 4.6; 12 / 16; 26 / 32.
    channels, (rows, columns) = input.shape[-3], filter.shape[-2:]
    weight = filter.to(input.dtype).expand(channels, 1, rows, columns)
    return conv2d(input, weight, stride=stride, padding=(rows // 2, columns // 2), groups=channels)


class BlurPool2d(nn.Module):
    """Blur each channel with the binomial filter ``[1, 2, 1] x [1, 2, 1] / 16``, then subsample (arXiv:1904.11486).

    The input is padded with zeros, as in most convolutions, so that the output has the size of a layer with this
    stride: ``floor((size - 1) / stride) + 1``. At the border the sum of the weights is 3/4 of that inside.

    Shape: ``(N, C, H, W)`` or ``(C, H, W)``, floating point; dtype and memory format are preserved. There are no
    parameters and no entries in the state dict. See :func:`blur_2d`.

    Args:
        channels: The number of channels, which is checked; any number if 0.
        stride: The stride, one number or (rows, columns); 1 blurs without subsampling.

    Raises:
        ValueError: ``stride`` is less than 1, or ``channels`` negative; when called, the input has another number of
            channels.

    Example:
        >>> BlurPool2d(stride=2)(torch.ones(1, 8, 5, 5))[0, 0]
        tensor([[0.5625, 0.7500, 0.5625],
                [0.7500, 1.0000, 0.7500],
                [0.5625, 0.7500, 0.5625]])
    """

    filter: Tensor

    def __init__(self, channels: int = 0, stride: int | tuple[int, ...] = 2) -> None:
        super().__init__()
        check_whole("channels", channels, 0, "It is the number of channels, or 0 for any.")
        self.channels = channels
        check_pixels(stride=stride)
        self.stride = _pair(stride)
        if min(self.stride) < 1:
            raise ValueError(f"stride must be at least 1, got {stride}. It is the stride of the subsampling.")
        self.register_buffer("filter", torch.empty(1, 1, 3, 3), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the filter; needed after ``to_empty`` of a model created on the meta device."""
        self.filter.copy_(_binomial(self.filter))

    def forward(self, input: Tensor) -> Tensor:
        """Blur and subsample."""
        return blur_2d(input, self.channels or -1, self.stride, self.filter)

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"channels={self.channels}, stride={self.stride}"


class BlurMaxPool2d(nn.Module):
    """Max pooling with stride 1, then a blur with the stride (arXiv:1904.11486).

    Arguments and output size are those of ``torch.nn.MaxPool2d``.

    Shape: ``(N, C, H, W)`` or ``(C, H, W)``, floating point; dtype and memory format are preserved.

    Args:
        kernel_size: Size of the window, one number or (rows, columns).
        stride: Stride of the blur; ``kernel_size`` if ``None``.
        padding: Rows and columns of minus infinity around the input.
        dilation: Distance of the elements in a window.
        ceil_mode: Whether a last window that is partly outside the input counts.

    Example:
        >>> BlurMaxPool2d(kernel_size=3, stride=2, padding=1)(torch.rand(1, 8, 9, 9)).shape
        torch.Size([1, 8, 5, 5])
    """

    def __init__(
        self,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] | None = None,
        padding: int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__()
        check_pixels(kernel_size=kernel_size, padding=padding, dilation=dilation)
        check_flags(ceil_mode=ceil_mode)
        if stride is not None:
            check_pixels(stride=stride)
        self.kernel_size = _pair(kernel_size)
        self.padding = _pair(padding)
        self.dilation = _pair(dilation)
        self.ceil_mode = ceil_mode
        self.blur = BlurPool2d(stride=self.kernel_size if stride is None else stride)

    @classmethod
    def from_maxpool2d(cls, module: nn.MaxPool2d, module_index: int = -1) -> Self:  # noqa: ARG003
        """Return a blurred layer with the settings of a max pooling: a policy for :func:`replace_module_classes`.

        Args:
            module: The max pooling.
            module_index: Not used.
        """
        return cls(module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)

    def forward(self, input: Tensor) -> Tensor:
        """Take maxima, blur, subsample."""
        if _pools_faster_with_channels_last(input):
            return self._pool(input.contiguous(memory_format=torch.channels_last)).contiguous()
        return self._pool(input)

    def _pool(self, input: Tensor) -> Tensor:
        if self.ceil_mode:
            # max_pool2d's own ceil_mode cannot be used: with stride 1 there is no partial window.
            rows, columns = (self._count_padding(dim, input.shape[dim - 2]) for dim in (0, 1))
            input = pad(input, (0, columns, 0, rows), value=-torch.inf)
        maxima = max_pool2d(input, self.kernel_size, 1, self.padding, self.dilation)
        output: Tensor = self.blur(maxima)
        return output

    def _count_padding(self, dim: int, size: int) -> int:
        """Return the rows or columns to pad for the last, partial window of ceil_mode."""
        stride, padding = self.blur.stride[dim], self.padding[dim]
        last = size + 2 * padding - self.dilation[dim] * (self.kernel_size[dim] - 1) - 1
        steps = -(-last // stride)
        if steps * stride >= size + padding:  # it would start in the padding on the right
            steps -= 1
        return max(steps * stride - last, 0)

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"kernel_size={self.kernel_size}, padding={self.padding}, dilation={self.dilation}"


class BlurConv2d(nn.Module):
    """A strided convolution with a blur before or after it (arXiv:1904.11486).

    ``blur_first``: blur, then convolve with the stride. Otherwise: convolve with stride 1, then blur with the stride,
    as in the paper, which costs about stride² times the convolution. The output size is that of the convolution.

    The convolution is the attribute ``conv``, with its parameters, hooks, groups, dilation and padding: in a state dict
    ``weight`` becomes ``conv.weight``; both attributes can be read. Its stride becomes 1 where the blur subsamples:
    with ``blur_first=False``, and for a 1x1 convolution, where both orders give the same result and the blur is
    computed only at the positions that are used.

    Shape: that of ``conv``.

    Args:
        *args: Arguments of ``torch.nn.Conv2d``, for a new convolution.
        blur_first: Whether to blur before the convolution.
        conv: An existing convolution to use; **its stride may be changed**.
        **kwargs: Arguments of ``torch.nn.Conv2d``.

    Raises:
        TypeError: ``conv`` is not a two-dimensional convolution, or is passed together with arguments for a new one.
        ValueError: The convolution has stride 1, so that there is nothing to blur.

    Example:
        >>> BlurConv2d(16, 32, 3, stride=2, padding=1)(torch.rand(1, 16, 8, 8)).shape
        torch.Size([1, 32, 4, 4])
    """

    def __init__(self, *args: Any, blur_first: bool = True, conv: nn.Conv2d | None = None, **kwargs: Any) -> None:
        super().__init__()
        if conv is not None and (args or kwargs):
            raise TypeError("conv must come without arguments for a new convolution, got both. Leave out one of them.")
        conv = nn.Conv2d(*args, **kwargs) if conv is None else conv
        if not isinstance(conv, nn.Conv2d):
            raise TypeError(f"conv must be a torch.nn.Conv2d, got {type(conv).__name__}.")
        if max(conv.stride) == 1:
            raise ValueError("stride must be above 1, got 1. Without subsampling there is nothing to blur.")
        check_flags(blur_first=blur_first)
        self.blur_first = blur_first
        self.conv = conv
        is_pointwise = conv.kernel_size == (1, 1) and conv.padding in {(0, 0), "valid"}
        if blur_first and not is_pointwise:
            self.blur = BlurPool2d(stride=1)
        else:
            self.blur = BlurPool2d(stride=_pair(conv.stride))
            conv.stride = (1, 1)

    @classmethod
    def from_conv2d(cls, module: nn.Conv2d, module_index: int = -1, blur_first: bool = True) -> Self:  # noqa: ARG003
        """Blur an existing convolution: a policy for :func:`replace_module_classes`.

        Args:
            module: The convolution, which becomes ``conv``; **its stride may be changed**.
            module_index: Not used.
            blur_first: As for the class.
        """
        return cls(conv=module, blur_first=blur_first)

    @property
    def weight(self) -> Tensor:
        """The convolution's weight."""
        return self.conv.weight

    @property
    def bias(self) -> Tensor | None:
        """The convolution's bias."""
        return self.conv.bias

    def forward(self, input: Tensor) -> Tensor:
        """Blur and convolve, or convolve and blur."""
        output: Tensor = self.conv(self.blur(input)) if self.blur_first else self.blur(self.conv(input))
        return output

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"blur_first={self.blur_first}"


def _pools_faster_with_channels_last(input: Tensor) -> bool:
    """Return whether to convert the memory format: torch's CPU kernel is vectorised for channels last only.

    Forward and backward of (8, 64, 112, 112) on one thread: 55 ms instead of 163; maxima by rows, then by columns: 184.
    """
    plain_on_cpu = input.ndim == 4 and input.device.type == "cpu" and input.is_contiguous()
    return plain_on_cpu and not torch.compiler.is_compiling()


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
