"""llama.cpp as a contestant of bench_cpu.py: a model of ours as a GGUF file, and a process that decodes with it.

    python scripts/bench_llama.py FILE THREADS SETTINGS     # the process: decodes one token for every line it reads

The process needs llama-cpp-python and gguf, and no PyTorch; the parent needs none of the three.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class LlamaCpp:
    """One decoded token per call, by llama.cpp in a process of its own."""

    def __init__(self, python: str, model: Any, folder: Path, threads: int):
        from safetensors.torch import save_file

        config = model.config
        tensors = {name: t.detach().contiguous() for name, t in model.backbone.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")
        fields = ("vocab_size", "hidden_size", "num_hidden_layers", "state_size", "conv_kernel", "layer_norm_epsilon")
        settings = {name: getattr(config, name) for name in fields}
        settings |= {"arch": config.model_type, "dtype": str(model.dtype).removeprefix("torch.")}
        if config.model_type == "mamba":
            settings |= {"d_inner": config.intermediate_size, "rank": config.time_step_rank, "ngroups": 0}
        else:
            settings |= {"d_inner": config.num_heads * config.head_dim, "rank": config.num_heads}
            settings |= {"ngroups": config.n_groups}
        command = [python, __file__, str(folder / "model.safetensors"), str(threads), repr(settings)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self._answer() != "ready":
            raise RuntimeError(f"{python} could not run llama.cpp; its message is above")

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def __call__(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("token\n")
        self.process.stdin.flush()
        self._answer()


# --- the other process ---------------------------------------------------------------------------------------------


def write_gguf(source: Path, target: Path, settings: dict[str, Any]) -> None:
    """Our tensors under llama.cpp's names; as its converter does, only matrices in the model's dtype."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(target, settings["arch"])
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(settings["hidden_size"])
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(settings["num_hidden_layers"])
    writer.add_vocab_size(settings["vocab_size"])
    writer.add_ssm_conv_kernel(settings["conv_kernel"])
    writer.add_ssm_inner_size(settings["d_inner"])
    writer.add_ssm_state_size(settings["state_size"])
    writer.add_ssm_time_step_rank(settings["rank"])
    if settings["ngroups"]:
        writer.add_ssm_group_count(settings["ngroups"])
    writer.add_layer_norm_rms_eps(settings["layer_norm_epsilon"])
    writer.add_tokenizer_model("no_vocab")
    half = settings["dtype"] == "bfloat16"
    names = {
        "norm.weight": "attn_norm.weight", "mixer.in_proj.weight": "ssm_in.weight",
        "mixer.conv1d.weight": "ssm_conv1d.weight", "mixer.conv1d.bias": "ssm_conv1d.bias",
        "mixer.x_proj.weight": "ssm_x.weight", "mixer.dt_proj.weight": "ssm_dt.weight",
        "mixer.dt_proj.bias": "ssm_dt.bias", "mixer.dt_bias": "ssm_dt.bias", "mixer.A_log": "ssm_a",
        "mixer.D": "ssm_d", "mixer.norm.weight": "ssm_norm.weight", "mixer.out_proj.weight": "ssm_out.weight",
    }  # fmt: skip
    for name, values in read_safetensors(source):
        if name == "embeddings.weight":
            target_name = "token_embd.weight"
        elif name == "norm_f.weight":
            target_name = "output_norm.weight"
        else:
            _, layer, rest = name.split(".", 2)
            target_name = f"blk.{layer}.{names[rest]}"
            if rest == "mixer.A_log":
                values = -np.exp(values)
            if rest in ("mixer.A_log", "mixer.D") and settings["arch"] == "mamba2":
                values = values.reshape(-1, 1)
            if rest == "mixer.norm.weight":
                values = values.reshape(settings["ngroups"], -1)
            if rest == "mixer.conv1d.weight":
                values = values.squeeze(1)
        matrix = target_name.endswith((".ssm_in.weight", ".ssm_out.weight", ".ssm_x.weight", "token_embd.weight"))
        if half and (matrix or target_name.endswith("ssm_dt.weight")):
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(target_name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target_name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_safetensors(path: Path) -> Any:
    """(name, float32 array) of every tensor; float32 and bfloat16 files, by the format's own layout."""
    import json

    import numpy as np

    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            file.seek(8 + size + begin)
            raw = file.read(end - begin)
            if entry["dtype"] == "BF16":
                values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
            else:
                values = np.frombuffer(raw, np.float32)
            yield name, values.reshape(entry["shape"])


def main() -> None:
    import ast

    from llama_cpp import Llama

    source, threads, settings = Path(sys.argv[1]), int(sys.argv[2]), ast.literal_eval(sys.argv[3])
    target = source.with_suffix(".gguf")
    write_gguf(source, target, settings)
    model = Llama(str(target), n_ctx=512, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)
    model.eval([1] * 64)
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        model.eval([1])
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
