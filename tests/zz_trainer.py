import sys, tempfile, torch, time
from tests.support import dist_helpers, expert_adapters as cases
from tests.support.numerics import rel_err


def work(rank, cls, folder, options):
    from transformers import Trainer, TrainingArguments
    from moe_patch import patch_model
    from moe_patch.expert_parallel import attach_adapter

    model = cases.load(cls, folder, options)
    torch.manual_seed(0)
    model = patch_model(attach_adapter(model, cases.config("qwen3_moe", False)))
    data = [{k: v[0] for k, v in cases.batch("any", i).items()} for i in range(8)]
    args = TrainingArguments(
        output_dir=folder + "/out",
        max_steps=3,
        per_device_train_batch_size=2,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        max_grad_norm=0.1,
        learning_rate=1e-2,
        logging_steps=1,
        disable_tqdm=True,
        seed=0,
    )
    tr = Trainer(model=model, args=args, train_dataset=data)
    tr.train()
    tr.save_model(folder + "/adapter")
    return [{k: h[k] for k in ("loss", "grad_norm") if k in h} for h in tr.state.log_history]


def main():
    from safetensors.torch import load_file

    for opts in ({"tp_size": 2, "ep_size": 2}, {"fsdp_size": 2, "ep_size": 2}):
        with tempfile.TemporaryDirectory() as d:
            m = cases.make("qwen3_moe")
            m.save_pretrained(d)
            r = dist_helpers.Ranks(2)
            try:
                out = r.call(work, (type(m), d, opts))
                print(opts, out[0], out[1])
                f = load_file(d + "/adapter/adapter_model.safetensors")
                print({k: tuple(v.shape) for k, v in list(f.items())[:2]}, flush=True)
            except BaseException as e:
                print(opts, "FAILED", str(e)[-900:], flush=True)
            finally:
                r.kill()


if __name__ == "__main__":
    main()
