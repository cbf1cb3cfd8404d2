# Written by docs/generate.py from the commands' files: change it there, then run `make docs`.

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from .base import Endpoint

class CommandMethods(ABC):
    def __init__(self) -> None: ...
    def _run_endpoint(self, endpoint: Endpoint, arguments: Mapping[str, Any]) -> str: ...
    def end_weight_update(
        self,
        flush_cache: bool | None = None,
        abort_all_requests: bool | None = None,
        weight_version: str | None = None,
        discard: bool | None = None,
    ) -> str: ...
    def attach_hicache_storage_backend(
        self,
        hicache_storage_backend: str,
        hicache_storage_backend_extra_config_json: str | None = None,
        hicache_storage_prefetch_policy: Literal['best_effort', 'wait_complete', 'timeout'] | None = None,
        hicache_write_policy: str | None = None,
    ) -> str: ...
    def begin_weight_update(
        self,
    ) -> str: ...
    def weights_checker(
        self,
        action: Literal['checksum', 'snapshot', 'reset_tensors', 'compare'] = 'checksum',
    ) -> str: ...
    def clear_hicache_storage_backend(
        self,
    ) -> str: ...
    def clear_hicache_storage(
        self,
    ) -> str: ...
    def continue_generation(
        self,
    ) -> str: ...
    def destroy_weights_update_group(
        self,
        group_name: str = 'weight_update_group',
    ) -> str: ...
    def detach_hicache_storage_backend(
        self,
    ) -> str: ...
    def flush_cache(
        self,
    ) -> str: ...
    def freeze_gc(
        self,
    ) -> str: ...
    def get_weights_by_name(
        self,
        name: str,
        truncate_size: int = 100,
    ) -> str: ...
    def hicache_storage_backend(
        self,
    ) -> str: ...
    def init_weights_send_group_for_remote_instance(
        self,
        master_address: str,
        ports: str,
        group_rank: int = 0,
        world_size: int = 2,
        group_name: str = 'weight_send_group',
        backend: Literal['nccl', 'gloo'] = 'nccl',
    ) -> str: ...
    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = 'weight_update_group',
        backend: Literal['nccl', 'gloo'] = 'nccl',
    ) -> str: ...
    def pause_generation(
        self,
        mode: Literal['abort', 'retract', 'in_place'] | None = None,
    ) -> str: ...
    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        flush_cache: bool | None = None,
        abort_all_requests: bool | None = None,
        weight_version: str | None = None,
        group_name: str = 'weight_update_group',
        load_format: Literal['flattened_bucket'] | None = None,
    ) -> str: ...
    def start_expert_distribution_record(
        self,
    ) -> str: ...
    def stop_expert_distribution_record(
        self,
    ) -> str: ...
    def dump_expert_distribution_record(
        self,
        output_dir: str | None = None,
    ) -> str: ...
    def release_memory_occupation(
        self,
        tags: Sequence[Literal['weights', 'kv_cache']] | None = None,
    ) -> str: ...
    def resume_memory_occupation(
        self,
        tags: Sequence[Literal['weights', 'kv_cache']] | None = None,
    ) -> str: ...
    def save_sharded_model(
        self,
        path: str,
        pattern: str | None = None,
        max_size: int | None = None,
    ) -> str: ...
    def send_weights_to_remote_instance(
        self,
        master_address: str,
        ports: str,
        group_name: str = 'weight_send_group',
    ) -> str: ...
    def set_internal_state(
        self,
        server_args: Mapping[str, Any],
    ) -> str: ...
    def slow_down(
        self,
        forward_sleep_time: float | None = None,
    ) -> str: ...
    def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        flush_cache: bool | None = None,
        abort_all_requests: bool | None = None,
        weight_version: str | None = None,
        load_format: str | None = None,
        disable_draft_model: bool | None = None,
    ) -> str: ...
    def update_weights_from_ipc(
        self,
        flush_cache: bool | None = None,
        abort_all_requests: bool | None = None,
        weight_version: str | None = None,
        zmq_handles: Mapping[str, Any] = {},
    ) -> str: ...
    def start_profile(
        self,
        output_dir: str | None = None,
        num_steps: int | None = None,
        activities: Sequence[Literal['CPU', 'GPU', 'CUDA_PROFILER']] | None = None,
        with_stack: bool | None = None,
        record_shapes: bool | None = None,
        profile_by_stage: bool | None = None,
        start_step: int | None = None,
        profile_prefix: str | None = None,
        profile_id: str | None = None,
        merge_profiles: bool | None = None,
    ) -> str: ...
    def stop_profile(
        self,
    ) -> str: ...
    def switch_role(
        self,
        role: str | None = None,
        new_role: str | None = None,
        server_args: Mapping[str, Any] | None = None,
    ) -> str: ...
    def pd_role_switch(
        self,
        role: str | None = None,
        new_role: str | None = None,
        server_args: Mapping[str, Any] | None = None,
    ) -> str: ...
    def update_weights_from_disk(
        self,
        model_path: str,
        revision: str | None = None,
        abort_all_requests: bool | None = None,
        weight_version: str | None = None,
        load_format: str | None = None,
        is_async: bool | None = None,
        keep_pause: bool | None = None,
        token_step: int | None = None,
    ) -> str: ...
    def update_weights(
        self,
        model_path: str,
        revision: str | None = None,
        abort_all_requests: bool | None = None,
        weight_version: str | None = None,
        load_format: str | None = None,
        is_async: bool | None = None,
        keep_pause: bool | None = None,
        token_step: int | None = None,
    ) -> str: ...

def signature_of(endpoint: Endpoint) -> Any: ...
