#!/bin/sh
# Prints the path of the first Python 3.11 or newer that can make a virtual environment and compile
# an extension. Each candidate is run, since a name on PATH may be a shim that fails.
#
#   scripts/find_python.sh [NAME...]        names to try, in order

set -u

[ $# -gt 0 ] || set -- python3.11 python3.12 python3.13 python3

probe='
import ensurepip, os, sys, sysconfig, venv
if sys.version_info < (3, 11):
    sys.exit(1)
header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
sys.exit(0 if os.path.exists(header) else 1)
'

for name in "$@"; do
    case $name in
        */*) found=$name ;;
        *)
            # Every place on PATH, not only the first: the shim often hides a working one.
            found=
            old_ifs=$IFS
            IFS=:
            for directory in $PATH; do
                [ -x "$directory/$name" ] && found="$found
$directory/$name"
            done
            IFS=$old_ifs
            ;;
    esac
    for candidate in $found; do
        if "$candidate" -c "$probe" >/dev/null 2>&1; then
            "$candidate" -c 'import sys; print(sys.executable)'
            exit 0
        fi
    done
done

echo "megamoe needs Python 3.11 or newer with venv and headers; tried: $*." >&2
echo "Install one (Debian, Ubuntu: apt-get install python3-venv python3-dev), or name it:" >&2
echo "  make demo PYTHON=/path/to/python3.12" >&2
exit 1
