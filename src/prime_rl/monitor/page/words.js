// What the numbers mean, for somebody who sees them for the first time, and which of them belong together.

const MEANING = {
  "reward/mean": "Score of the rollouts, averaged over the batch. This is what training tries to raise.",
  "val_reward/mean": "The same score on held-out prompts that are never trained on.",
  "loss/mean": "What the optimizer lowers. In reinforcement learning it stays near 0 and says little by itself.",
  "entropy/mean": "How undecided the policy is at each token. Falls as it becomes sure; a collapse to 0 ends exploration.",
  "mismatch_kl/mean":
    "How far the engine that samples and the trainer that learns are apart on the same tokens. Should stay near 0.",
  "teacher_kl/mean": "Distance between student and teacher on the student's own tokens. 0 when they agree.",
  "importance_ratio/mean": "Probability of a token now over its probability when it was sampled. 1 means on-policy.",
  "is_masked/mean": "Share of tokens outside the trust region: they moved too far and are left alone.",
  "optim/grad_norm": "Length of the gradient before clipping. Spikes point at unusual batches.",
  "optim/lr": "Learning rate, as the schedule says.",
  "completion_len/mean": "Tokens the policy writes per rollout.",
  "seq_len/mean": "Tokens per rollout, prompt included.",
  "prompt_len/mean": "Tokens of the prompt.",
  "num_turns/mean": "Turns of the conversation per rollout.",
  "is_truncated/mean": "Share of rollouts cut off at the token limit.",
  "perf/throughput": "Tokens per second: of the trainer, while it is busy.",
  "perf/mfu": "Share of the arithmetic the hardware could do, in percent.",
  "perf/peak_memory": "Most memory the trainer held, in GiB.",
  "time/step": "Seconds from one optimizer step to the next.",
  "time/wait_for_batch": "Seconds the trainer waits for rollouts in each step.",
  "time/forward_backward": "Seconds the trainer computes in each step.",
  "time/update_weights": "Seconds until the engines hold new weights.",
  "batch/async_level": "Versions between the policy that is trained and the one that is live in the engines.",
  "batch/off_policy_level/max": "Age, in versions, of the oldest token of a batch.",
  "batch/off_policy_level/mean": "Age, in versions, of the tokens of a batch on average.",
  "batch/effective_batch_size": "Share of groups whose rollouts differ in reward: only these teach anything.",
  "batch/solve_all": "Share of prompts that every rollout solves.",
  "batch/solve_none": "Share of prompts that no rollout solves.",
  "error/mean": "Share of rollouts that failed for technical reasons.",
};

const CHAPTERS = [
  ["Does it learn?", [["reward/mean", "val_reward/mean"], ["reward/*"], ["eval/*/avg*"], ["batch/solve_all", "batch/solve_none"],
    ["batch/effective_batch_size"], ["metrics/*"]]],
  ["Is it stable?", [["loss/mean"], ["entropy/mean"], ["mismatch_kl/mean"], ["teacher_kl/mean"], ["optim/grad_norm"], ["optim/lr"],
    ["importance_ratio/mean", "importance_ratio/max"], ["is_masked/mean"]]],
  ["How long are the answers?", [["completion_len/mean", "completion_len/max"], ["seq_len/mean"], ["num_turns/mean"], ["is_truncated/mean"],
    ["error/mean"]]],
  ["How fast is it?", [["perf/throughput"], ["time/step"], ["time/forward_backward", "time/wait_for_batch"],
    ["perf/mfu"], ["time/update_weights"], ["perf/peak_memory"]]],
  ["How asynchronous is it?", [["batch/async_level"], ["batch/off_policy_level/max", "batch/off_policy_level/mean"],
    ["groups/in_flight"], ["event_loop_lag/max"]]],
];

const TILES = [
  ["reward/mean", "Reward"], ["val_reward/mean", "Validation reward"], ["loss/mean", "Loss"], ["entropy/mean", "Entropy"],
  ["mismatch_kl/mean", "Mismatch KL"], ["teacher_kl/mean", "Teacher KL"], ["completion_len/mean", "Completion length"],
  ["perf/throughput", "Tokens per second"], ["batch/async_level", "Async level"], ["optim/grad_norm", "Gradient norm"],
];

const ACTIVITY = {
  "orchestrator generate": "collects a batch", "orchestrator update_weights": "hands on weights", generate: "writes rollouts", decode: "writes rollouts", forward_backward: "computes gradients", wait_for_batch: "waits for rollouts",
  update_weights: "loads new weights", broadcast_weights: "publishes weights", load_data: "packs the batch",
  save_ckpt: "saves a checkpoint", eval: "evaluates", val: "validates", validation: "validates",
};

const COLOURING = {
  advantage: ["Advantage", "How much better (blue) or worse (orange) this rollout was than its group: what each token is trained with."],
  logprob: ["Log-probability", "How surprising each token was to the policy that sampled it: the darker, the less likely."],
  teacher: ["Teacher − student", "Blue: the teacher likes the token better than the student does. Orange: less."],
  trainer: ["Trainer − engine", "Difference between the two computations of the same probability. No colour: they agree."],
  version: ["Policy version", "Which version of the policy wrote the token. Weights may change in the middle of a rollout."],
  none: ["No colour", "Just the tokens."],
};
