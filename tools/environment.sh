# Sourced by the tools. Makes their environment, or brings it up to date, and sets `python` to its Python. `root` is the
# project's folder; $setup_for may be --to-run.
# --help installs nothing: it is answered by an environment that is there, or else by the tool's own first lines, which are
# all of its help with $help_is_above. $help_of is a tool that is not in tools/.
python="$root/.venv-tools/bin/python"
asks_for_help() {
    local argument
    for argument; do
        case "$argument" in
            --) return 1 ;;
            -h | --help) return 0 ;;
        esac
    done
    return 1
}
if ! asks_for_help "$@"; then
    "$root/tools/setup" ${setup_for:+"$setup_for"}
elif [[ -n "${help_is_above:-}" ]]; then
    sed -n '2,/^[^#]/s/^# //p' "${help_of:-$root/tools/$(basename "$0")}"
    exit 0
elif ! "$python" -P -c 'import diskprefix, click' >/dev/null 2>&1; then
    sed -n '2,/^[^#]/s/^# //p' "${help_of:-$root/tools/$(basename "$0")}"
    echo "The rest of its help needs packages that are not installed yet: run tools/setup once, which takes minutes."
    exit 0
fi
