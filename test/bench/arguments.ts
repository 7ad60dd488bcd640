// What a benchmark is told on its command line.

export interface BenchArguments {
  /** The parts to run. */
  readonly chosen: readonly string[];
  /** Of each load. */
  readonly seconds: number;
  /** The file that the rows are written to. */
  readonly json: string | null;
  /** The file of an earlier run. */
  readonly against: string | null;
}

const SECONDS = 4;
const SECONDS_MAX = 60;

export function usage(parts: readonly string[]): string {
  return `arguments: [--seconds N] [--json FILE] [--against FILE] [PART …]; all parts if none is named: ${parts.join(", ")}`;
}

/** Gives what is wrong with them, if anything is. */
export function parseArguments(args: readonly string[], parts: readonly string[]): BenchArguments | string {
  const options: Record<string, string> = { seconds: String(SECONDS) };
  const chosen: string[] = [];
  const rest = args.values();
  for (const arg of rest) {
    if (parts.includes(arg)) chosen.push(arg);
    else if (!/^--(seconds|json|against)$/.test(arg)) return `${arg} is neither a part nor an option`;
    else {
      const { value, done } = rest.next();
      if (done || value.startsWith("--")) return `${arg} needs a value`;
      options[arg.slice(2)] = value;
    }
  }
  const { seconds, json = null, against = null } = options;
  const number = Number(seconds);
  if (!Number.isInteger(number) || number < 1 || number > SECONDS_MAX) {
    return `--seconds is a whole number from 1 to ${SECONDS_MAX}`;
  }
  return { chosen: chosen.length > 0 ? chosen : parts, seconds: number, json, against };
}
