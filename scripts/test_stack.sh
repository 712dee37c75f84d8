#!/usr/bin/env bash
# The whole stack in containers: built, started, scaled and restarted service by service amid a run, and then counted.
#
# Usage: scripts/test_stack.sh. Exit code: 0 passed, 1 failed, 69 no Docker engine here. The compose project `evener-test` is
# this script's own: it is removed with its volumes before and after. EVENER_WHEELS: a folder of wheels that the build prefers.
set -euo pipefail
cd "$(dirname "$0")/.."

PROJECT=evener-test
SCALE=(--scale proxy=2 --scale runner=3 --scale verifier=2)
RESTARTED=(runner verifier proxy orchestrator learner engine rabbitmq redis postgres)
HEALTHY_S=300
RUN_S=1200

docker version >/dev/null 2>&1 || {
    echo "test-stack: no Docker engine answers here (\`docker version\` fails); start one, or use \`make test\`, which needs none" >&2
    exit 69
}
docker compose version >/dev/null 2>&1 || {
    echo "test-stack: docker compose (version 2) is missing" >&2
    exit 69
}

out=$PWD/.out
work=$(mktemp -d)
mkdir -p "$out"
export EVENER_API_PORT=0 # any free one
export EVENER_WORK=$work/runs
export EVENER_POLICY_FOLDER=$work/runs/tiny-policy
files=(-f compose.yaml)
if [ -n "${EVENER_WHEELS:-}" ]; then
    for service in $(docker compose --profile cli config --services); do
        case $service in postgres | redis | rabbitmq) continue ;; esac
        printf '  %s: { build: { additional_contexts: { wheels: "%s" } } }\n' "$service" "$EVENER_WHEELS"
    done | { echo "services:"; cat; } >"$work/wheels.yaml"
    files+=(-f "$work/wheels.yaml")
fi

compose() { docker compose -p "$PROJECT" "${files[@]}" --progress quiet "$@"; }
say() { printf '== %s (%ss)\n' "$*" "$SECONDS"; }
fail() {
    compose ps -a >&2 || true
    compose logs --no-color >"$out/test-stack.log" 2>&1 || true
    echo "test-stack: FAILED: $* (logs: .out/test-stack.log)" >&2
    exit 1
}
clean() {
    [ -z "${follower:-}" ] || kill "$follower" 2>/dev/null || true
    COMPOSE_PROFILES=cli compose down --volumes --remove-orphans --rmi local --timeout 5 >/dev/null 2>&1 || true
    rm -rf "$work"
}
trap clean EXIT
trap 'exit 130' INT TERM

sql() { compose exec -T postgres psql -U evener -d evener -Atc "$1"; }
python() { compose exec -T "$1" python3 -c "$2"; }

# Wait until every container of a service is healthy, and there are some.
healthy() {
    local deadline=$((SECONDS + HEALTHY_S)) states
    while :; do
        # shellcheck disable=SC2046
        states=$(docker inspect --format '{{.State.Health.Status}}' $(compose ps -q "$1") 2>/dev/null | sort -u)
        [ "$states" = healthy ] && return
        [ "$SECONDS" -lt "$deadline" ] || fail "$1 is ${states:-absent} after $HEALTHY_S s"
        sleep 1
    done
}

write_run() {
    mkdir -p "$work/runs"
    cp -r examples/first-run/tasks examples/first-run/tiny-policy "$work/runs"
    cat >"$work/runs/run.toml" <<'TOML'
name = "stack"
policy = "./tiny-policy"
tasks = "./tasks/train"

[[harness]]
name = "pi"

[rollouts]
group_size = 8
concurrent = 6

[budget]
calls = 6
sampled_tokens = 384
wall_s = 120

[train]
steps = 1
groups_per_step = 4
learning_rate = 6e-4
TOML
    chmod -R a+rX "$work"
}

ended() { sql "select count(*) from rollouts where outcome is not null" 2>/dev/null || echo 0; }

# One run of 32 rollouts after the other, until every service was restarted.
runs() {
    until [ -e "$work/restarted" ]; do
        compose run --rm -T --no-deps cli run run.toml --new || return 1
    done
}

# What an agent's host must not reach, and the user that everything of ours runs as.
isolation() {
    local target service
    for target in postgres:5432 redis:6379 engine:8703; do
        if python runner "import socket; socket.create_connection(('${target%:*}', ${target#*:}), 3)" 2>/dev/null; then
            fail "a runner reaches $target"
        fi
    done
    [ -z "$(compose exec -T runner find /var/lib/evener/blobs/grader -type f)" ] || fail "a runner holds tests of tasks"
    for service in orchestrator proxy runner verifier engine learner; do
        [ "$(compose exec -T "$service" id -u)" = 10001 ] || fail "$service runs as another user"
    done
}

COMPOSE_PROFILES=cli compose down --volumes --remove-orphans --timeout 5 >/dev/null 2>&1 || true
write_run
say "build"
COMPOSE_PROFILES=cli compose build
say "up"
started=$SECONDS
compose up -d --wait --wait-timeout "$HEALTHY_S" || fail "not healthy"
up_s=$((SECONDS - started))
services=$(compose ps --services --status running | wc -l)
say "$services services healthy after $up_s s"
isolation

runs >"$work/run.log" 2>&1 &
follower=$!
deadline=$((SECONDS + RUN_S))
until [ "$(ended)" -ge 4 ]; do
    kill -0 "$follower" 2>/dev/null || fail "the run ended early: $(tail -n 3 "$work/run.log")"
    [ "$SECONDS" -lt "$deadline" ] || fail "no rollout ended in $RUN_S s"
    sleep 1
done
say "scale: ${SCALE[*]}"
compose up -d --no-recreate --wait --wait-timeout "$HEALTHY_S" "${SCALE[@]}" || fail "not healthy after scaling"
restarts=0
for service in "${RESTARTED[@]}"; do
    say "restart $service ($(ended) rollouts ended)"
    kill -0 "$follower" 2>/dev/null || fail "a run: $(tail -n 5 "$work/run.log")"
    compose restart "$service"
    healthy "$service"
    restarts=$((restarts + 1))
done
touch "$work/restarted"
say "wait for the last run ($(ended) rollouts ended)"
while kill -0 "$follower" 2>/dev/null; do
    [ "$SECONDS" -lt "$deadline" ] || fail "the runs did not end in $RUN_S s: $(tail -n 5 "$work/run.log")"
    sleep 1
done
wait "$follower" || fail "a run: $(tail -n 5 "$work/run.log")"
follower=

rollouts=$(sql "select count(*) from rollouts")
open=$(sql "select count(*) from rollouts where outcome is null")
lost=$(sql "select count(*) from rollouts where outcome = 'infra_error'")
finished=$(sql "select count(*) from rollouts where outcome in ('finished', 'budget', 'agent_error')")
retried=$(sql "select count(*) from rollouts where attempt > 1")
runners=$(sql "select count(distinct runner) from attempts where runner is not null")
other=$(sql "select count(*) from attempts where sandbox not in ('', 'bubblewrap')")
runs=$(sql "select count(*) from runs")
untrained=$(sql "select count(*) from runs where state <> 'done' or step <> 1")
dead=$(compose exec -T -u rabbitmq rabbitmq rabbitmqctl -q list_queues name messages | awk '$1 == "evener.dead" { print $2 }')
sql "select outcome, count(*) from rollouts group by 1 order by 1"
compose exec -T orchestrator evener sql "select harness, count(*) from harness_matrix group by 1" || fail "evener sql"
questions=$(awk '/^```sql$/ { on = 1; next } /^```$/ { if (on) print ";"; on = 0 } on' docs/sql.md)
compose exec -T postgres psql -X -U evener_read -d evener -v ON_ERROR_STOP=1 -Atqc "$questions" >/dev/null || fail "docs/sql.md as evener_read"
[ "$open" = 0 ] || fail "$open rollouts without outcome"
[ "$lost" = 0 ] || fail "$lost rollouts lost to infra_error: $(sql "select distinct cause from rollouts where outcome = 'infra_error'")"
[ "$finished" -ge $((32 * runs)) ] || fail "only $finished rollouts of $runs runs with 32 each"
[ "$untrained" = 0 ] || fail "$untrained of $runs runs did not end with their step"
[ "$other" = 0 ] || fail "$other attempts outside bubblewrap"
[ "${dead:-0}" = 0 ] || fail "$dead dead letters"

line="services=$services runs=$runs rollouts=$rollouts lost=$lost retried=$retried runners=$runners restarts=$restarts healthy_s=$up_s seconds=$SECONDS"
printf '{"%s}\n' "$(sed 's/ /, "/g; s/=/": /g' <<<"$line")" >"$out/test-stack.json"
echo "test-stack: $line"
