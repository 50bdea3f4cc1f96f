#!/bin/bash
# {{ task.name }}
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
{% for name, value in env.items() %}
export {{ name }}={{ value | quote }}
{% endfor %}
# No proxy is between the machines.
no_proxy="${no_proxy:-${NO_PROXY:-}}"
if [ "$no_proxy" != "*" ]; then
  for host in "${!HOST_@}"; do no_proxy="${no_proxy:+$no_proxy,}${!host}"; done
fi
export no_proxy NO_PROXY="$no_proxy"
{% if task.gpus %}
# Numbers of GPUs count the visible ones, such as those that Ray has assigned, if so many are named.
IFS=, read -ra gpus <<< "${CUDA_VISIBLE_DEVICES:-}"
[ "{% raw %}${#gpus[@]}{% endraw %}" -gt {{ task.gpus | max }} ] || gpus=({{ range((task.gpus | max) + 1) | join(" ") }})
export CUDA_VISIBLE_DEVICES="{% for gpu in task.gpus %}${gpus[{{ gpu }}]}{{ "," if not loop.last }}{% endfor %}"
{% elif task.gpus is not none %}
export CUDA_VISIBLE_DEVICES=''
{% endif %}
{% if task.first_options %}
first=({{ task.first_options | map("quote") | join(" ") }})
{% if num_starts is not none %}
# Queued again after its trainer has started, the job continues from the latest checkpoint.
starts=$(grep -csE '"process":"(trainer|sft)"' "$here/../attempts.jsonl" || true)
[ "${starts:-0}" -le {{ num_starts }} ] || first=()
{% endif %}
{% endif %}
exec {{ python | quote }} -m {% if task.num_ranks %}torch.distributed.run \
  --nnodes={{ task.places | length }} \
  --node-rank={{ '"$NODE_RANK"' if task.places | length > 1 else 0 }} \
  --nproc-per-node={{ task.num_ranks }} \
  --master-addr="$HOST_{{ task.places[0] }}" \
  --master-port={{ task.port }} -m {% endif %}{{ task.module }} \
  @ "$here/{{ task.config }}" \
{% for option, value in task.options | batch(2) %}
  {{ option }} {{ '"' ~ value ~ '"' if "$" in value else value | quote }} \
{% endfor %}
{% if task.first_options %}
  ${first[@]+"${first[@]}"} \
{% endif %}
  "$@"
