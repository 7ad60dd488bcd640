// `tollgate completion`: scripts that complete commands, flags and some of their values in bash, zsh and fish. All three are made
// from one table of what may follow where, which comes from the registry of commands.
import { StartupProblem } from "../../core/startup.ts";
import { didYouMean } from "../../core/text.ts";
import { PAGES } from "../../gateway/manual/pages.ts";
import { type CliCommand, type Commands, grammarOf, shownWord } from "../command-line.ts";
import { meaningOf } from "./help.ts";

type Described = readonly [word: string, meaning: string];

/** What may follow after the words of a command (`path`), or after none. */
interface Place extends Readonly<Record<"words" | "flags", readonly Described[]>> {
  readonly path: string;
  readonly takesFile: boolean;
}

interface FlagValue {
  readonly flag: string;
  readonly kind: "words" | "file" | "directory" | "text";
  readonly words: readonly string[];
}

const SHELLS = { bash: bashScript, zsh: zshScript, fish: fishScript };

/** @throws StartupProblem when no such shell is known */
export function completionScript(shell: string, commands: Commands, serve: CliCommand): string {
  const known = Object.keys(SHELLS);
  if (Object.hasOwn(SHELLS, shell)) {
    const all = [serve, ...Object.values(commands)];
    return SHELLS[shell as keyof typeof SHELLS](placesOf(commands, serve), flagValues(all));
  }
  const hint = didYouMean(shell, known);
  throw new StartupProblem(`SHELL must be bash, zsh or fish: there are no completions for ${shownWord(shell)}${hint}`);
}

function placesOf(commands: Commands, serve: CliCommand): Place[] {
  const entries = Object.entries(commands);
  const groups = new Set(entries.flatMap(([name]) => (name.includes(" ") ? [name.slice(0, name.indexOf(" "))] : [])));
  const alone = [...groups].filter((name) => commands[name] === undefined);
  const after = (group: string): Described[] =>
    entries.flatMap(([name, { summary }]) =>
      name.startsWith(`${group} `) ? [[name.slice(group.length + 1), summary] as const] : [],
    );
  const firsts: Described[] = [
    ...entries.filter(([name]) => !name.includes(" ")).map(([name, { summary }]) => [name, summary] as const),
    ...alone.map((name): Described => [name, summaryOfGroup(after(name))]),
  ];
  const arguments_: Readonly<Record<string, readonly Described[]>> = {
    completion: Object.keys(SHELLS).map((shell) => [shell, `completions for ${shell}`]),
    help: [...PAGES.map(({ name, summary }): Described => [name, summary]), ...firsts],
  };
  const always: Described[] = [
    ["--help", "every command and variable"],
    ["--version", "print the version"],
  ];
  return [
    { path: "", words: firsts, flags: [...flagsOf("", serve), ...always], takesFile: false },
    ...alone.map((path) => ({ path, words: after(path), flags: [], takesFile: false })),
    ...[...groups].map((name) => ({ path: `help ${name}`, words: after(name), flags: [], takesFile: false })),
    ...entries.map(([path, command]) => ({
      path,
      words: arguments_[path] ?? after(path),
      flags: [...flagsOf(path, command), ["--help", "this command's help"] as const],
      takesFile: grammarOf(command.forms).words.some((word) => /FILE$/.test(word)),
    })),
  ];
}

const summaryOfGroup = (commands: readonly Described[]): string =>
  commands.length === 1 ? (commands[0]?.[1] ?? "") : commands.map(([name]) => name).join(", ");

const flagsOf = (path: string, { forms }: CliCommand): Described[] =>
  grammarOf(forms).known.map((flag) => [`--${flag}`, meaningOf(path, flag) ?? ""]);

/** The values of all flags that take one. A flag has the same kind of value in every command. */
function flagValues(commands: readonly CliCommand[]): FlagValue[] {
  const found = new Map<string, FlagValue>();
  for (const { forms } of commands) {
    const { known, valueForm } = grammarOf(forms);
    for (const flag of known) {
      const value = valueForm(flag);
      if (value !== undefined) found.set(flag, { flag: `--${flag}`, ...valueKind(value) });
    }
  }
  return [...found.values()];
}

function valueKind(value: string): Omit<FlagValue, "flag"> {
  if (value === "DIR") return { kind: "directory", words: [] };
  if (/\bFILE\b/.test(value)) return { kind: "file", words: [] };
  return value.includes("|") ? { kind: "words", words: value.split("|") } : { kind: "text", words: [] };
}

/** Quoted for any of the three shells. No text of the registry has a backslash. */
const quote = (text: string) => `'${text.replaceAll("'", "'\\''")}'`;
const listed = (words: readonly Described[]) => words.map(([word]) => word).join(" ");
const flagsOfKind = (values: readonly FlagValue[], kind: FlagValue["kind"]) =>
  values.filter((value) => value.kind === kind).map(({ flag }) => flag);
const pathsOfTwo = (places: readonly Place[]) => places.map(({ path }) => path).filter((path) => path.includes(" "));

function bashScript(places: readonly Place[], values: readonly FlagValue[]): string {
  const words = values.filter(({ kind }) => kind === "words");
  const files = [...flagsOfKind(values, "file"), ...flagsOfKind(values, "directory")];
  const cases = places.map(
    ({ path, words, flags, takesFile }) =>
      `    ${quote(path)}) words=${quote(listed(words))} flags=${quote(listed(flags))} file=${takesFile ? 1 : ""} ;;\n`,
  );
  return `# Completions of tollgate for bash. In ~/.bashrc: source <(tollgate completion bash)
_tollgate() {
  local current=\${COMP_WORDS[COMP_CWORD]} before=\${COMP_WORDS[COMP_CWORD-1]} path= words= flags= file=
  # Bash splits --flag=value into three words.
  if [[ $current == = ]]; then current=
  elif [[ $before == = ]]; then before=\${COMP_WORDS[COMP_CWORD-2]}
  fi
  COMPREPLY=()
  case $before in
${words.map(({ flag, words }) => `    ${flag}) COMPREPLY=($(compgen -W ${quote(words.join(" "))} -- "$current")); return ;;\n`).join("")}    # Readline completes names of files where there are no others.
    ${files.join("|")}) return ;;
    ${flagsOfKind(values, "text").join("|")}) compopt +o default 2>/dev/null; return ;;
  esac
  if (( COMP_CWORD > 1 )); then path=\${COMP_WORDS[1]}; fi
  if (( COMP_CWORD > 2 )); then
    case "$path \${COMP_WORDS[2]}" in
      ${pathsOfTwo(places).map(quote).join("|")}) path="$path \${COMP_WORDS[2]}" ;;
    esac
  fi
  case $path in
${cases.join("")}    *) flags=${quote(listed(places[0]?.flags ?? []))} ;;
  esac
  if [[ $current == -* ]]; then words=$flags file=; fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  if [[ -z $file ]]; then compopt +o default 2>/dev/null; fi
}
complete -o default -F _tollgate tollgate
`;
}

function zshScript(places: readonly Place[], values: readonly FlagValue[]): string {
  const described = (words: readonly Described[]) =>
    words.map(([word, meaning]) => quote(`${word}:${meaning.replaceAll(":", "\\:")}`)).join(" ");
  const cases = places.map(
    ({ path, words, flags, takesFile }) =>
      `    ${quote(path)}) words_here=(${described(words)}) flags_here=(${described(flags)}) file=${takesFile ? 1 : ""} ;;\n`,
  );
  const words = values.filter(({ kind }) => kind === "words");
  const pairs = pathsOfTwo(places).map((path) => `(${quote(path)})`);
  return `#compdef tollgate
# Completions of tollgate for zsh. In ~/.zshrc, after compinit: source <(tollgate completion zsh)
_tollgate() {
  local path_here= file=
  local -a words_here flags_here
  case $words[CURRENT-1] in
${words.map(({ flag, words }) => `    ${flag}) compadd -- ${words.join(" ")}; return ;;\n`).join("")}    ${flagsOfKind(values, "directory").join("|")}) _files -/; return ;;
    ${flagsOfKind(values, "file").join("|")}) _files; return ;;
    ${flagsOfKind(values, "text").join("|")}) _message value; return ;;
  esac
  if (( CURRENT > 2 )); then path_here=$words[2]; fi
  if (( CURRENT > 3 )); then
    case "$words[2] $words[3]" in
      ${pairs.join("|")}) path_here="$words[2] $words[3]" ;;
    esac
  fi
  case $path_here in
${cases.join("")}    *) flags_here=(${described(places[0]?.flags ?? [])}) ;;
  esac
  if [[ $words[CURRENT] == -* ]]; then
    _describe flag flags_here
  else
    if (( $#words_here )); then _describe command words_here; fi
    if [[ -n $file ]]; then _files; fi
  fi
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _tollgate "$@"; else compdef _tollgate tollgate; fi
`;
}

function fishScript(places: readonly Place[], values: readonly FlagValue[]): string {
  const argumentsOf = (flag: string) => {
    const value = values.find((each) => each.flag === flag);
    if (value === undefined) return "";
    if (value.kind === "words") return ` -x -a ${quote(value.words.join(" "))}`;
    if (value.kind === "directory") return " -x -a '(__fish_complete_directories)'";
    return value.kind === "file" ? " -r -F" : " -x";
  };
  const lines = places.flatMap(({ path, words, flags, takesFile }) => {
    const here = `complete -c tollgate -n ${quote(`__tollgate_at ${path === "" ? "''" : `"${path}"`}`)}`;
    return [
      ...words.map(([word, meaning]) => `${here} -a ${word} -d ${quote(meaning)}\n`),
      ...flags.map(([flag, meaning]) => `${here} -l ${flag.slice(2)}${argumentsOf(flag)} -d ${quote(meaning)}\n`),
      ...(takesFile ? [`${here} -F\n`] : []),
    ];
  });
  return `# Completions of tollgate for fish. tollgate completion fish > ~/.config/fish/completions/tollgate.fish
function __tollgate_at
    set -l words (commandline -opc)
    set -e words[1]
    set -l path "$words[1]"
    if contains -- "$words[1..2]" ${pathsOfTwo(places).map(quote).join(" ")}
        set path "$words[1..2]"
    end
    if string match -q -- '-*' "$path"
        set path ''
    end
    test "$path" = "$argv[1]"
end
complete -c tollgate -f
${lines.join("")}`;
}
