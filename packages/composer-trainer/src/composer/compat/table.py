"""Names of MosaicML Composer 0.32 that are elsewhere here, or not available: the only table of them."""

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

__all__ = ["ARGUMENTS", "ATTRIBUTES", "NAMES", "Entry", "entries", "former_modules", "parse_home"]

_ADDRESSES = (
    "Remote files are addresses: load_path='s3://bucket/run', save_folder='s3://bucket/run'; fsspec reads them."
)
_CHECKPOINTS = (
    "Use Trainer(load_path=..., save_folder=...), or composer.checkpoint.load_checkpoint and save_checkpoint."
)
_FSDP = "Use Trainer(parallelism_config={'fsdp': {...}}), which is FSDP2."
_STRINGS = "Give the setting as text or as a dictionary; there is no class for it."
_ACCELERATORS = "Only CPU, CUDA and MPS devices are supported."
_REPORTS = "Run python -m torch.utils.collect_env."
_STREAMING = "Use torchvision.datasets, Hugging Face datasets or mosaicml-streaming for data."
_IN_CONTEXT = "In-context learning evaluations are in LLM Foundry and lm-evaluation-harness."
_RESNETS = "Use composer.models.composer_torchvision('resnet50', num_classes=...)."
_TRANSFORMERS = "Use composer.models.HuggingFaceModel with a model of Transformers."
_TIMM = "Use composer.models.composer_timm(name, num_classes=...)."
_PLATFORM = "The vendor's platform is not supported; use WandBLogger, MLFlowLogger or TensorboardLogger."
_DEVICE = "composer.compat.replacements: use device='gpu' of the Trainer, or torch.device('cuda')"
_SYNC = "DDP and FSDP2 are set up by the Trainer: give ddp_sync_strategy and parallelism_config."
_LOCAL_ZERO = "Use the context manager composer.distributed.run_local_rank_zero_first()."

NAMES: Mapping[str, Mapping[str, str]] = {
    # Helpers
    "composer.utils.dist": {
        "composer.distributed": (
            "* all_gather all_gather_object all_reduce barrier broadcast broadcast_object_list get_global_rank "
            "get_local_rank get_local_world_size get_node_rank get_sampler get_world_size initialize_dist is_available "
            "is_initialized run_local_rank_zero_first"
        ),
        _LOCAL_ZERO: (
            "busy_wait_for_local_rank_zero get_node_signal_file_name local_rank_zero_download_and_wait "
            "write_signal_file"
        ),
    },
    "composer.utils.reproducibility": {
        "composer.trainer.reproducibility": "* MAX_SEED configure_deterministic_mode get_random_seed seed_all",
        "Checkpoints contain the states of all generators; elsewhere use torch.random.fork_rng.": (
            "get_rng_state load_rng_state"
        ),
    },
    "composer.utils.module_surgery": {
        "composer.functional": (
            "* ReplacementFunction count_module_instances replace_module_classes update_params_in_optimizer"
        ),
    },
    "composer.utils[.batch_helpers]": {"composer.core": "batch_get batch_set"},
    "composer.utils[.device]": {_DEVICE: "get_device", _ACCELERATORS: "is_hpu_installed is_xla_installed"},
    "composer.utils[.iter_helpers]": {
        "composer.compat.replacements: use list(...) or tuple(...)": "ensure_tuple",
        "Use a comprehension.": "map_collection",
        "Use io.TextIOWrapper.": "IteratorFileStream",
    },
    "composer.utils[.string_enum]": {"enum": "StringEnum=StrEnum"},
    "composer.utils[.misc]": {
        "composer.core.evaluator": "model_eval_mode=evaluation_mode",
        "torch.distributed.elastic.utils.distributed": "get_free_tcp_port=get_free_port",
        "composer.compat.replacements: use composer.core.Interval(interval).is_due(state)": "create_interval_scheduler",
        "composer.compat.replacements: remove the check; the model of the state is never wrapped": "is_model_ddp",
        "DeepSpeed is not supported; use parallelism_config={'fsdp': {...}} of the Trainer.": "is_model_deepspeed",
        "Use state.fsdp_enabled.": "is_model_fsdp",
        "Use tqdm.auto, which selects the right progress bar.": "is_notebook",
        "Remove the check: torch is always 2.7 or later.": "using_torch_2",
        "Use functools.partial(str.format, ...).": "partial_format",
        "AugMix, RandAugment and ColOut change the dataset's transform by themselves.": "add_vision_dataset_transform",
    },
    "composer.utils[.import_helpers]": {
        "pkgutil": "import_object=resolve_name",
        "Raise an ImportError that contains the command to install.": "MissingConditionalImportError",
    },
    "composer.utils[.inference]": {
        "composer.export.inference": "Transform",
        "Use trainer.export_for_inference(...), or composer.export.export_for_inference for a model alone.": (
            "export_for_inference export_with_logger"
        ),
        "The formats are texts: 'torchexport' or 'onnx'.": "ExportFormat",
        "Use torchao.quantization.quantize_.": "quantize_dynamic",
    },
    "composer.utils[.file_helpers]": {
        _ADDRESSES: (
            "get_file list_remote_objects maybe_create_object_store_from_uri "
            "maybe_create_remote_uploader_downloader_from_uri maybe_create_remote_uploader_from_uri "
            "validate_credentials"
        ),
        "Use urllib.parse.urlsplit.": "parse_uri",
        "Use tarfile.is_tarfile.": "is_tar",
        "Use os.symlink: the link of the newest checkpoint is written by the CheckpointSaver.": "create_symlink_file",
        "The CheckpointSaver checks its folder when training starts; elsewhere use pathlib.Path.iterdir.": (
            "ensure_folder_has_no_conflicting_files ensure_folder_is_empty"
        ),
        "File names are filled in by callbacks and loggers: '{run_name}', '{rank}', '{epoch}', '{batch}'.": (
            "FORMAT_NAME_WITH_DIST_AND_TIME_TABLE FORMAT_NAME_WITH_DIST_TABLE format_name_with_dist "
            "format_name_with_dist_and_time"
        ),
    },
    "composer.utils[.checkpoint]": {
        _CHECKPOINTS: "load_checkpoint save_checkpoint PartialFilePath",
        "Use composer.checkpoint.load_torch_weights(path), which runs no code.": "safe_torch_load",
    },
    "composer.utils[.object_store]": {
        _ADDRESSES: (
            "* GCSObjectStore LibcloudObjectStore MLFlowObjectStore OCIObjectStore ObjectStore "
            "ObjectStoreTransientError S3ObjectStore SFTPObjectStore UCObjectStore build_remote_backend"
        ),
    },
    "composer.utils[.remote_uploader]": {_ADDRESSES: "* RemoteFilesExistingCheckStatus RemoteUploader"},
    "composer.utils[.retrying]": {"Use tenacity.retry; remote paths are tried again without it.": "* retry"},
    "composer.utils[.collect_env]": {
        _REPORTS: "* configure_excepthook disable_env_report enable_env_report get_composer_env_dict print_env"
    },
    "composer.utils[.parallelism]": {
        "Give a dictionary: Trainer(parallelism_config={'fsdp': {...}}).": (
            "* FSDP2Config FSDPConfig ParallelismConfig TPConfig"
        ),
    },
    "composer.utils[.compression]": {
        "Checkpoints are not compressed.": "* CliCompressor KNOWN_COMPRESSORS get_compressor is_compressed_pt"
    },
    "composer.utils[.eval_client]": {
        _IN_CONTEXT: "* EvalClient LambdaEvalClient LocalEvalClient MosaicMLLambdaEvalClient"
    },
    "composer.utils[.warnings]": {"Use DeprecationWarning.": "VersionedDeprecationWarning"},
    # Devices
    "composer.devices[.device]": {"torch": "Device=device"},
    "composer.devices[.device_cpu]": {_DEVICE.replace("gpu", "cpu").replace("cuda", "cpu"): "DeviceCPU"},
    "composer.devices[.device_gpu]": {_DEVICE: "DeviceGPU"},
    "composer.devices[.device_mps]": {_DEVICE.replace("gpu", "mps").replace("cuda", "mps"): "DeviceMPS"},
    "composer.devices[.device_tpu]": {_ACCELERATORS: "* DeviceTPU"},
    "composer.devices[.device_hpu]": {_ACCELERATORS: "* DeviceHPU"},
    "composer.devices[.device_neuron]": {_ACCELERATORS: "* DeviceNeuron"},
    # Core
    "composer.core[.types]": {
        "torch.utils.data": "Dataset",
        "torch.optim.lr_scheduler": "PyTorchScheduler=LRScheduler",
        "composer.compat.replacements: annotate with typing.Any or your own type": "JSON",
    },
    "composer.core.types": {"composer.core": "Batch MemoryFormat TrainerMode"},
    "composer.core": {
        "Microbatches of an evaluation are set by Evaluator(device_eval_microbatch_size=...).": (
            "validate_eval_automicrobatching"
        ),
    },
    # Models, metrics and losses
    "composer.models.tasks[.classification]": {"composer.models": "ComposerClassifier"},
    "composer.models.mmdetection": {"composer.models": "MMDetModel"},
    "composer.models[.resnet]": {_RESNETS: "* composer_resnet"},
    "composer.models[.resnet_cifar]": {
        "Use ComposerClassifier with your own network, or composer_torchvision('resnet18', num_classes=10).": (
            "* composer_resnet_cifar"
        ),
    },
    "composer.models[.efficientnetb0]": {_TIMM: "* composer_efficientnetb0"},
    "composer.models[.vit_small_patch16]": {_TIMM: "* vit_small_patch16"},
    "composer.models[.classify_mnist]": {"Use ComposerClassifier with your own network.": "* mnist_model"},
    "composer.models[.deeplabv3]": {
        "Use composer.models.composer_torchvision('deeplabv3_resnet50', num_classes=...).": "* composer_deeplabv3"
    },
    "composer.models[.unet]": {"Use composer.models.ComposerSegmenter with your own network.": "* UNet"},
    "composer.models[.bert]": {_TRANSFORMERS: "* create_bert_classification create_bert_mlm"},
    "composer.models[.gpt2]": {_TRANSFORMERS: "* create_gpt2"},
    "composer.metrics.nlp": {
        "composer.metrics": "BinaryF1Score LanguageCrossEntropy LanguagePerplexity MaskedAccuracy",
        _IN_CONTEXT: "InContextLearningLMAccuracy InContextLearningMetric InContextLearningMultipleChoiceAccuracy",
    },
    "composer.metrics": {
        _IN_CONTEXT: "InContextLearningLMAccuracy InContextLearningMetric InContextLearningMultipleChoiceAccuracy",
    },
    "composer.metrics.metrics": {"composer.metrics": "CrossEntropy Dice LossMetric MAP MIoU"},
    "composer.loss.loss": {
        "composer.loss": "DiceLoss binary_cross_entropy_with_logits loss_registry soft_cross_entropy"
    },
    "composer.datasets": {_STREAMING: "*"},
    # The trainer and what surrounds it
    "composer.trainer.dist_strategy": {
        "composer.distributed": "DDPSyncStrategy",
        _SYNC: "ddp_sync_context prepare_ddp_module prepare_fsdp_module",
    },
    "composer.distributed.dist_strategy": {
        "composer.distributed": "DDPSyncStrategy",
        _SYNC: "ddp_sync_context prepare_ddp_module prepare_fsdp_module prepare_tp_module",
    },
    "composer.distributed": {_SYNC: "ddp_sync_context prepare_ddp_module prepare_fsdp_module prepare_tp_module"},
    "composer.trainer.mosaic_fsdp": {_FSDP: "*"},
    "composer.trainer.mosaic_fsdp_utils": {_FSDP: "*"},
    "composer.checkpoint.load": {_CHECKPOINTS: "*"},
    "composer.checkpoint.save": {_CHECKPOINTS: "*"},
    "composer.checkpoint.download": {_ADDRESSES: "*"},
    "composer.checkpoint.state_dict": {
        "Use trainer.state.get_model_state_dict() and get_optim_state_dict().": "*",
    },
    "composer.callbacks.checkpoint_saver": {"composer.callbacks": "CheckpointSaver"},
    "composer.callbacks.early_stopper": {"composer.callbacks": "EarlyStopper"},
    "composer.callbacks.threshold_stopper": {"composer.callbacks": "ThresholdStopper"},
    "composer.callbacks.oom_observer": {"composer.callbacks": "OOMObserver"},
    "composer.callbacks.utils": {
        "composer.compat.replacements: use composer.core.Interval(interval).is_due(state)": "create_interval_scheduler",
    },
    "composer.callbacks[.mlperf]": {"MLPerf's log is not available.": "* MLPerfCallback"},
    "composer.callbacks[.eval_output_logging_callback]": {
        "Log a table in your own callback at EVAL_BATCH_END: logger.log_table(columns, rows).": "* EvalOutputLogging",
    },
    "composer.loggers.logger": {
        "composer.loggers": "Logger",
        "Loggers shorten values by themselves.": "format_log_data_value",
    },
    "composer.loggers.logger_destination": {"composer.loggers": "LoggerDestination"},
    "composer.loggers.cometml_logger": {"composer.loggers": "CometMLLogger"},
    "composer.loggers[.mosaicml_logger]": {
        _PLATFORM: "* MOSAICML_ACCESS_TOKEN_ENV_VAR MOSAICML_PLATFORM_ENV_VAR MosaicMLLogger"
    },
    "composer.loggers[.remote_uploader_downloader]": {_ADDRESSES: "* RemoteUploaderDownloader"},
    "composer.profiler.profiler_action": {"composer.profiler": "ProfilerAction"},
    "composer.profiler.profiler_schedule": {"composer.profiler": "cyclic_schedule"},
    "composer.profiler.trace_handler": {"composer.profiler": "TraceHandler"},
    "composer.profiler.marker": {"composer.profiler": "Marker"},
    "composer.profiler[.system_profiler]": {
        "Use Profiler(sys_prof_cpu=True, sys_prof_memory=True, ...).": "* SystemProfiler"
    },
    # Algorithms
    "composer.algorithms.alibi.alibi": {"composer.algorithms": "Alibi", "composer.functional": "apply_alibi"},
    "composer.algorithms.alibi.attention_surgery_functions": {
        "Models of Transformers are recognized; for your own attention see composer.functional.apply_alibi.": "*",
    },
    "composer.algorithms.augmix.augmix": {
        "composer.algorithms": "AugMix",
        "composer.functional": "AugmentAndMixTransform augmix_image",
    },
    "composer.algorithms.blurpool.blurpool": {
        "composer.algorithms": "BlurPool",
        "composer.functional": "apply_blurpool",
    },
    "composer.algorithms.blurpool[.blurpool_layers]": {
        "composer.functional": "BlurConv2d BlurMaxPool2d BlurPool2d blur_2d",
        "Use composer.functional.BlurMaxPool2d(kernel_size, stride)(input).": "blurmax_pool2d",
    },
    "composer.algorithms.channels_last.channels_last": {
        "composer.algorithms": "ChannelsLast",
        "composer.functional": "apply_channels_last",
    },
    "composer.algorithms.colout.colout": {
        "composer.algorithms": "ColOut",
        "composer.functional": "ColOutTransform colout_batch",
    },
    "composer.algorithms.cutmix.cutmix": {"composer.algorithms": "CutMix", "composer.functional": "cutmix_batch"},
    "composer.algorithms.cutout.cutout": {"composer.algorithms": "CutOut", "composer.functional": "cutout_batch"},
    "composer.algorithms.ema.ema": {"composer.algorithms": "EMA", "composer.functional": "compute_ema"},
    "composer.algorithms.factorize.factorize": {
        "composer.algorithms": "Factorize",
        "composer.functional": "apply_factorization",
    },
    "composer.algorithms.factorize[.factorize_core]": {
        "composer.functional": "factorize_conv2d factorize_matrix",
        "The two factors are returned as a tuple by composer.functional.factorize_matrix.": "LowRankSolution",
    },
    "composer.algorithms.factorize[.factorize_modules]": {
        "composer.functional": "FactorizedConv2d FactorizedLinear",
        "Layers that would not become cheaper are skipped by composer.functional.apply_factorization.": (
            "factorizing_could_speedup"
        ),
    },
    "composer.algorithms.fused_layernorm.fused_layernorm": {
        "composer.algorithms": "FusedLayerNorm",
        "composer.functional": "apply_fused_layernorm",
    },
    "composer.algorithms.gated_linear_units.gated_linear_units": {
        "composer.algorithms": "GatedLinearUnits",
        "composer.functional": "apply_gated_linear_units",
    },
    "composer.algorithms.gated_linear_units.gated_linear_unit_layers": {
        "composer.functional": "BERTGatedFFOutput=GatedLinearUnit"
    },
    "composer.algorithms.ghost_batchnorm.ghost_batchnorm": {
        "composer.algorithms": "GhostBatchNorm",
        "composer.functional": "GhostBatchNorm1d GhostBatchNorm2d GhostBatchNorm3d apply_ghost_batchnorm",
    },
    "composer.algorithms.gradient_clipping.gradient_clipping": {
        "composer.algorithms": "GradientClipping",
        "composer.functional": "apply_gradient_clipping",
    },
    "composer.algorithms.gyro_dropout.gyro_dropout": {
        "composer.algorithms": "GyroDropout",
        "composer.functional": "GyroDropoutLayer=GyroDropout apply_gyro_dropout",
    },
    "composer.algorithms.label_smoothing.label_smoothing": {
        "composer.algorithms": "LabelSmoothing",
        "composer.functional": "smooth_labels",
    },
    "composer.algorithms.layer_freezing.layer_freezing": {
        "composer.algorithms": "LayerFreezing",
        "composer.functional": "freeze_layers",
    },
    "composer.algorithms.low_precision_groupnorm.low_precision_groupnorm": {
        "composer.algorithms": "LowPrecisionGroupNorm",
        "composer.functional": "LPGroupNorm=LowPrecisionGroupNorm apply_low_precision_groupnorm",
    },
    "composer.algorithms.low_precision_layernorm.low_precision_layernorm": {
        "composer.algorithms": "LowPrecisionLayerNorm",
        "composer.functional": "LPLayerNorm=LowPrecisionLayerNorm apply_low_precision_layernorm",
    },
    "composer.algorithms.mixup.mixup": {"composer.algorithms": "MixUp", "composer.functional": "mixup_batch"},
    "composer.algorithms.no_op_model[.no_op_model]": {"composer.algorithms": "NoOpModel"},
    "composer.algorithms.progressive_resizing.progressive_resizing": {
        "composer.algorithms": "ProgressiveResizing",
        "composer.functional": "resize_batch",
    },
    "composer.algorithms.randaugment.randaugment": {
        "composer.algorithms": "RandAugment",
        "composer.functional": "RandAugmentTransform randaugment_image",
    },
    "composer.algorithms.sam.sam": {"composer.algorithms": "SAM", "composer.functional": "SAMOptimizer"},
    "composer.algorithms.selective_backprop.selective_backprop": {
        "composer.algorithms": "SelectiveBackprop",
        "composer.functional": "select_using_loss should_selective_backprop",
    },
    "composer.algorithms.seq_length_warmup.seq_length_warmup": {
        "composer.algorithms": "SeqLengthWarmup",
        "composer.functional": "set_batch_sequence_length",
    },
    "composer.algorithms.squeeze_excite.squeeze_excite": {
        "composer.algorithms": "SqueezeExcite",
        "composer.functional": "SqueezeExcite2d SqueezeExciteConv2d apply_squeeze_excite",
    },
    "composer.algorithms.stochastic_depth.stochastic_depth": {
        "composer.algorithms": "StochasticDepth",
        "composer.functional": "apply_stochastic_depth",
    },
    "composer.algorithms.swa.swa": {"composer.algorithms": "SWA"},
    "composer.algorithms.weight_standardization.weight_standardization": {
        "composer.algorithms": "WeightStandardization",
        "composer.functional": "apply_weight_standardization",
    },
    "composer.algorithms.utils": {"Use composer.algorithms.Augment with a pipeline of kornia.": "*"},
    "composer.algorithms.warnings": {
        "composer.core": "NoEffectWarning",
        "builtins": "NotIntendedUseWarning=UserWarning",
    },
}
"""For each former module, the new modules and the names that are there: ``old=new`` where the name changed.

- ``composer.utils[.misc]`` is ``composer.utils`` and ``composer.utils.misc``: both had the names.
- ``*`` is the former module itself.
- A key with spaces is advice for names that have no equal; ``module: advice`` serves the names from a module of this
  package, and advises another way.
"""

ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "Trainer": {
        "load_object_store": "remove it; load_path is an address such as 's3://bucket/run/latest'",
        "load_progress_bar": "remove it; there is no progress bar for loading",
        "load_fsdp_monolith_rank0_only": "remove it; each process reads only its part",
        "fsdp_config": "parallelism_config={'fsdp': {...}}, with the settings of FSDP2",
        "deepspeed_config": "parallelism_config={'fsdp': {...}}",
        "grad_accum": "device_train_microbatch_size=..., the samples of a part of the batch",
        "eval_batch_split": "Evaluator(device_eval_microbatch_size=...)",
    },
    "export_for_inference": {"save_object_store": "remove it; save_path is a local path"},
    "BlurPool2d": {"padding": "remove it; the output always has the size of a layer with this stride"},
    "factorize_matrix": {"Wa": "factorize_matrix(weight, rank, inputs=X, targets=Y), which returns the factors"},
    "factorize_conv2d": {"Wa": "factorize_conv2d(weight, rank, inputs=X), which returns the factors"},
    "CheckpointSaver": {
        "remote_file_name": "remove it; folder is an address such as 's3://bucket/run'",
        "latest_remote_file_name": "remove it; folder is an address such as 's3://bucket/run'",
        "num_concurrent_uploads": "remove it",
        "upload_timeout_in_seconds": "remove it",
    },
}
"""Arguments that are not accepted here, by the last part of the called name."""

ATTRIBUTES: Mapping[str, str] = {
    "batch_to_device": "use composer.core.data_spec.move_batch(batch, device); state.device is a torch.device",
    "module_to_device": "use module.to(device); state.device is a torch.device",
    "optimizer_to_device": "remove it; the state of an optimizer moves with its parameters",
    "tensor_to_device": "use tensor.to(device); state.device is a torch.device",
}
"""Methods of Composer's devices, which are :class:`torch.device` here."""


class Entry(NamedTuple):
    """A former name, and its new home or advice.

    Attributes:
        former: The former dotted name.
        module: The module that has it here; None if it is not available.
        name: Its name there; None if it is the module itself.
        advice: What to use instead, if it is not simply moved.

    Example:
        >>> Entry("composer.utils.string_enum.StringEnum", "enum", "StrEnum", None).change
        'from enum import StrEnum as StringEnum'
    """

    former: str
    module: str | None
    name: str | None
    advice: str | None

    @property
    def change(self) -> str:
        """What to write instead."""
        if self.advice is not None:
            return self.advice
        former = self.former.rpartition(".")[2]
        if self.name is not None:
            renamed = "" if self.name == former else f" as {former}"
            return f"from {self.module} import {self.name}{renamed}"
        package, _, last = str(self.module).rpartition(".")
        return f"from {package} import {last}" + ("" if last == former else f" as {former}")


def entries() -> Mapping[str, Entry]:
    """Return the table by former dotted name.

    Example:
        >>> entries()["composer.utils.dist"].module
        'composer.distributed'
    """
    return _entries()


@functools.cache
def _entries() -> dict[str, Entry]:
    return {entry.former: entry for entry in _expand()}


@functools.cache
def former_modules() -> frozenset[str]:
    """Return the former modules that have names, and the packages that contain them, without the new homes."""
    having = {entry.former.rpartition(".")[0] for entry in entries().values() if entry.name is not None}
    having |= {entry.former for entry in entries().values() if entry.module is not None and entry.name is None}
    homes = {entry.module for entry in entries().values() if entry.module is not None}
    return frozenset(_beginnings(having) - _beginnings(homes))


def _beginnings(names: Iterable[str]) -> set[str]:
    split = [name.split(".") for name in names]
    return {".".join(parts[:length]) for parts in split for length in range(1, len(parts) + 1)}


def _expand() -> Iterator[Entry]:
    for places, homes in NAMES.items():
        package, _, inner = places.rstrip("]").partition("[")
        for home, names in homes.items():
            module, advice = parse_home(home)
            for item in names.split():
                former, _, new = item.partition("=")
                if former == "*":
                    yield Entry(package + inner, module, None, advice)
                    continue
                for place in dict.fromkeys([package + inner, package]):
                    yield Entry(f"{place}.{former}", module, new or former, advice)
                if home == "composer.functional" and package.startswith("composer.algorithms."):
                    yield Entry(f"{package.rpartition('.')[0]}.{former}", module, new or former, None)


def parse_home(home: str) -> tuple[str | None, str | None]:
    """Return the module and the advice of a key of the table: ``module``, ``advice`` or ``module: advice``.

    Example:
        >>> parse_home("composer.compat.replacements: use list(...)")
        ('composer.compat.replacements', 'use list(...)')
    """
    if " " not in home:
        return home, None
    module, found, advice = home.partition(": ")
    return (module, advice) if found and " " not in module else (None, home)
