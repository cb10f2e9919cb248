#!/usr/bin/env bash
# What needs no torch (schedules, formulas), on the newest Python that starts here. Usage: tests/newest.sh PYTHON, the
# Python that has all tests. Without a newer one, or without its packages, nothing is run, and the reason is printed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv-newest
version='import sys; print("%d.%02d" % sys.version_info[:2])'

newest=$("$1" -c "$version") python=
for one in python3.{12..19} "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3; do
    found=$("$one" -c "$version" 2>/dev/null) || continue
    if [[ $found > $newest ]]; then newest=$found python=$one; fi
done
if [[ -z $python ]]; then
    echo "What needs no torch is not run on a newer Python: none starts here that is newer than $("$1" --version)."
    exit 0
fi

if [[ $("$venv/bin/python" -c "$version" 2>/dev/null) != "$newest" || constraints.txt -nt $venv/.installed ]]; then
    if ! { "$python" -m venv --clear $venv && $venv/bin/python -m pip install -qq --disable-pip-version-check \
        --constraint constraints.txt pytest pytest-timeout hypothesis networkx && touch $venv/.installed; }; then
        rm -rf $venv
        echo "What needs no torch is not run on $("$python" --version): pytest can't be installed for it (see above)."
        exit 0
    fi
fi
echo "What needs no torch, on $($venv/bin/python --version):"
slow='events_agree or idle_time or large_schedule or wide_schedule or huge_svg or memory_grows or looser_bound'
PYTHONDONTWRITEBYTECODE='' $venv/bin/python -m pytest --hypothesis-profile few -k "not ($slow)" tests/schedules
PYTHONDONTWRITEBYTECODE='' $venv/bin/python -m pytest --doctest-modules raypar/planner/formulas
