// Metric descriptions and the grouping of metrics into charts.

const MEANING = {
  "reward/mean": "Line: mean reward of the training batch. Points: held-out evaluations with 95 % intervals.",
  "val_reward/mean": "Mean reward on held-out prompts.",
  "evolve/best": "Mean score of the best context so far. It is the maximum of noisy means, so evaluate it on held-out examples.",
  "evolve/score": "Mean score of a proposed context on the examples that it was tried on.",
  "loss/mean": "The training loss. In RL it stays near 0 and is not informative by itself.",
  "val_loss/mean": "The loss of SFT on held-out samples. It rises while the training loss falls when the model overfits.",
  "entropy/mean": "Mean entropy of the next-token distribution. A collapse to 0 ends exploration.",
  "entropy_coef": "Coefficient of the entropy bonus that entropy_control applies. 0 while the entropy is above the target.",
  "value_loss/mean": "Loss of the critic: squared error of its values against the returns.",
  "explained_variance": "Share of the variance of the returns that the critic's values explain. At 0 they help no more than a constant.",
  "observation_loss/mean": "Cross-entropy of the tokens that the environment wrote.",
  "mismatch_kl/mean":
    "KL between inference and trainer log-probs on the same tokens. Should stay near 0.",
  "teacher_kl/mean": "KL between student and teacher on the student's tokens. 0 when they agree.",
  "teacher_kl_reverse/mean": "KL(student || teacher) per token, over full distributions.",
  "teacher_kl_forward/mean": "KL(teacher || student) per token, over full distributions.",
  "teacher_coverage/mean": "Student probability of the teacher's most likely token.",
  "reference_kl/mean": "KL to the initial model on reference environments.",
  "distill/*/gap_closed": "Share of the gap between the student before training and the teacher with its context that is closed. 1 means all of it.",
  "distill/*/retention": "Current score over score before training, on environments without a context. 1 means no forgetting.",
  "distill/*/student/avg": "Mean reward of student and teacher on held-out examples.",
  "importance_ratio/mean": "Probability of a token now over its probability when it was sampled. 1 means on-policy.",
  "importance_ratio/ess": "Effective sample size: the share of tokens that would give the same noise without weights. Below 0.5, half of the batch is wasted.",
  "importance_ratio/staleness_*/p05": "Lower end of the ratios: 5 % of the tokens are below, by age in policy versions.",
  "importance_ratio/staleness_*/p95": "Upper end of the ratios: 5 % of the tokens are above. Ratios spread with age; at age 0 they show the mismatch of engine and trainer, and further updates on the batch.",
  "importance_ratio/staleness_*/ess": "Effective sample size of the tokens of one age. The age at which it falls is the staleness that the objective still bears.",
  "mismatch_kl/from_token_*/mean": "Mismatch of log-probs by position in the response. It should be flat; growth with length means that errors accumulate.",
  "first_mismatch/min": "First sampled token of a rollout whose log-prob differs between engine and trainer. No line: all are equal, bit for bit.",
  "is_masked/mean": "Share of tokens outside the trust region, which are masked.",
  "optim/grad_norm": "Gradient norm before clipping. Spikes indicate unusual batches.",
  "optim/lr": "Scheduled learning rate.",
  "completion_len/mean": "Generated tokens per rollout.",
  "seq_len/mean": "Tokens per rollout, prompt included.",
  "tokens/trained": "Sampled tokens since the start by fate. The sum is tokens/generated; trained should be most of it.",
  "prompt_len/mean": "Tokens of the prompt.",
  "num_turns/mean": "Turns of the conversation per rollout.",
  "is_truncated/mean": "Share of rollouts cut off at the token limit.",
  "perf/throughput": "Tokens per second of the last 10 steps, waiting included.",
  "perf/mfu": "Model FLOPs utilization of the last 10 steps, waiting included, in percent.",
  "perf/peak_memory": "Peak memory of the process, in GiB.",
  "time/step": "Seconds from one optimizer step to the next.",
  "time/wait_for_batch": "Seconds the trainer waits for rollouts in each step.",
  "time/forward_backward": "Seconds the trainer computes in each step.",
  "time/update_weights": "Seconds until the engines have new weights.",
  "batch/async_level": "Versions between the policy that is trained and the one that is live in the engines.",
  "batch/off_policy_level/max": "Age, in versions, of the oldest token of a batch.",
  "batch/off_policy_level/mean": "Age, in versions, of the tokens of a batch on average.",
  "batch/effective_batch_size": "Share of groups with different rewards; only these have a gradient if the baseline of the advantages is that of the group.",
  "reward/min": "Lowest, highest and standard deviation of the rewards in a batch. Without a spread nothing is learned.",
  "frac_reward_zero_std": "Share of groups with equal rewards; these have no gradient if the baseline of the advantages is that of the group.",
  "batch/solve_all": "Share of prompts that every rollout solves.",
  "batch/solve_none": "Share of prompts that no rollout solves.",
  "tokens_per_s/trained": "Tokens of forward_backward, and sampled tokens, per second of all tenants.",
  "queue/training": "Requests that have not finished: of training, which run one after the other, and samples.",
  "latency/training/p50": "Seconds from the arrival of a training request to its result, waiting included.",
  "latency/sampling/p50": "Seconds from the arrival of a sample request to its result.",
  "open/tenants": "API keys with an open session.",
  "open/models": "Models in training, and adapters that the engine holds for sampling.",
  "requests/*": "Finished requests per interval by kind.",
  "error/mean": "Share of rollouts that failed for technical reasons.",
};

// Label of the vertical axis: the first pattern that matches the name of the metric.
const UNITS = [[/^(reward|val_reward|eval)\/.*std$/, "standard deviation"], [/^(reward|val_reward)\/|\/(avg@\d+|student.*\/avg|teacher_context\/avg)$/, "reward"], [/pass[@^]/, "share solved"],
  [/^(loss|val_loss|observation_loss)|nll/, "loss, nats per token"], [/^value_loss/, "squared error"], [/^explained/, "share"], [/entropy_coef/, "coefficient"], [/kl|entropy/i, "nats per token"], [/(seq|prompt|completion)_len/, "tokens"], [/throughput|tokens_per_s/, "tokens per second"], [/^time\/|latency|_s$|event_loop_lag/, "seconds"],
  [/_ms/, "milliseconds"], [/memory/, "GiB"], [/mfu/, "percent"], [/async_level|off_policy/, "policy versions"], [/grad_norm/, "norm"], [/optim\/lr/, "learning rate"], [/\/ess$/, "share of the tokens"], [/first_mismatch/, "tokens"], [/ratio/, "ratio"],
  [/num_turns/, "turns"], [/is_|error\/mean|solve_|effective_|frac_|gap_closed|retention|coverage|overlong/, "share"], [/^progress\/|^queue\/|^open\/|^requests\/|tokens|samples|groups\/|evicted|pool\//, "count"]];

function unitOf(name) {
  return UNITS.find(([pattern]) => pattern.test(name ?? ""))?.[1] ?? "value";
}

const CHART_GROUPS = [
  ["Learning", [["reward/mean", "val_reward/mean", "eval/*/avg@*"], ["reward/min", "reward/max", "reward/std"], ["reward/*"], ["eval/*/pass@*"],
    ["batch/solve_all", "batch/solve_none", "frac_reward_zero_std"], ["metrics/*"]]],
  ["Stability", [["loss/mean", "val_loss/mean"], ["entropy/mean"], ["mismatch_kl/mean"], ["teacher_kl/mean"], ["optim/grad_norm"], ["optim/lr"],
    ["importance_ratio/mean", "importance_ratio/max"], ["is_masked/mean"], ["entropy_coef"], ["value_loss/mean"],
    ["explained_variance"], ["observation_loss/mean"]]],
  ["Off-policy diagnostics", [["importance_ratio/ess"], ["importance_ratio/staleness_*/p05"], ["importance_ratio/staleness_*/p95"],
    ["importance_ratio/staleness_*/ess"], ["mismatch_kl/from_token_*/mean"], ["first_mismatch/min", "first_mismatch/median"]]],
  ["Length", [["completion_len/mean", "completion_len/max"], ["seq_len/mean"], ["num_turns/mean"], ["is_truncated/mean"],
    ["error/mean"]]],
  ["Throughput", [["perf/throughput"], ["time/step"], ["time/forward_backward", "time/wait_for_batch"],
    ["perf/mfu"], ["time/update_weights"], ["perf/peak_memory"]]],
  ["Asynchrony", [["batch/async_level"], ["batch/off_policy_level/max", "batch/off_policy_level/mean"],
    ["groups/in_flight"], ["tokens/trained", "tokens/dropped", "tokens/unscored", "tokens/in_flight"], ["event_loop_lag/max"]]],
];

const SERVER_CHARTS = [
  ["Load", [["tokens_per_s/trained", "tokens_per_s/sampled"], ["queue/training", "queue/sampling"], ["requests/failed"], ["requests/*"]]],
  ["Latency", [["latency/training/p50", "latency/training/p99"], ["latency/sampling/p50", "latency/sampling/p99"]]],
  ["State", [["open/tenants", "open/sessions"], ["open/models", "open/loaded_adapters"], ["perf/peak_memory"]]],
];

const SERVER_TILES = [["tokens_per_s/trained", "Trained tokens per second"], ["tokens_per_s/sampled", "Sampled tokens per second"],
  ["queue/training", "Unfinished training requests"], ["queue/sampling", "Unfinished samples"], ["latency/training/p99", "Latency of training, p99"],
  ["latency/sampling/p99", "Latency of samples, p99"], ["open/models", "Models"], ["open/loaded_adapters", "Loaded adapters"], ["perf/peak_memory", "Peak memory"]];

// Titles of charts whose metrics have no common name.
const CHART_TITLES = { "importance_ratio/staleness_*/p05": "ratios by staleness, 5 %", "importance_ratio/staleness_*/p95": "ratios by staleness, 95 %",
  "importance_ratio/staleness_*/ess": "effective sample size by staleness", "mismatch_kl/from_token_*/mean": "mismatch by position", "tokens/trained": "sampled tokens", "reward/min": "spread of the rewards", "tokens_per_s/trained": "tokens per second", "queue/training": "unfinished requests", "requests/*": "finished requests",
  "open/tenants": "tenants and sessions", "open/models": "models and adapters", "batch/solve_all": "groups of prompts" };

// Shown first for runs with a teacher.
const TEACHER_CHARTS = ["Student and teacher", [["teacher_kl/mean", "teacher_kl_reverse/mean", "teacher_kl_forward/mean"],
  ["distill/*/gap_closed"], ["distill/*/retention"], ["distill/*/student/avg", "distill/*/student_context/avg", "distill/*/teacher_context/avg"],
  ["reference_kl/mean"], ["teacher_coverage/mean"], ["teacher/skipped/*"]]];

const REWARD_CHARTS = /^(reward\/|val_reward\/|batch\/(solve_|effective_))/;

function chartGroupsOf(kind) {
  if (kind.name === "server") return SERVER_CHARTS;
  const groups = kind.trains_on_rewards || (kind.scores_rewards && !kind.has_teacher) ? CHART_GROUPS
    : CHART_GROUPS.map(([title, charts]) => [title === "Learning" ? "Other metrics" : title, charts.filter(([name]) => !REWARD_CHARTS.test(name))]);
  return kind.has_teacher ? [TEACHER_CHARTS, ...groups] : groups;
}

const TREND_LABELS = { "reward/mean": "The reward", "teacher_kl/mean": "The teacher KL", "loss/mean": "The loss" };

const TEACHER_TILES = [["teacher_kl/mean", "Teacher KL"], ["reference_kl/mean", "Reference KL"], ["teacher_coverage/mean", "Teacher coverage"]];

const TILES = [
  ["reward/mean", "Reward"], ["val_reward/mean", "Validation reward"], ["loss/mean", "Loss"], ["entropy/mean", "Entropy"],
  ["mismatch_kl/mean", "Mismatch KL"], ["teacher_kl/mean", "Teacher KL"], ["completion_len/mean", "Completion length"],
  ["perf/throughput", "Tokens per second"], ["batch/async_level", "Async level"], ["optim/grad_norm", "Gradient norm"],
];

const ACTIVITY = {
  "orchestrator generate": "collects a batch", "orchestrator update_weights": "relays weights", generate: "generates rollouts", decode: "generates rollouts", forward_backward: "computes gradients", wait_for_batch: "waits for rollouts",
  update_weights: "loads new weights", broadcast_weights: "publishes weights", load_data: "packs the batch",
  save_ckpt: "saves a checkpoint", eval: "evaluates", val: "validates", validation: "validates",
};

const COLORING = {
  advantage: ["Advantage", "How much better (blue) or worse (orange) this rollout was than its group."],
  logprob: ["Log-probability", "Log-probability under the sampling policy; darker is less likely."],
  teacher: ["Teacher − student", "Blue: more likely under the teacher than under the student. Orange: less likely."],
  trainer: ["Trainer − engine", "Difference between trainer and engine log-probability. No color: equal."],
  version: ["Policy version", "Policy version that generated the token; it can change within a rollout."],
  none: ["No color", "Tokens only."],
};
