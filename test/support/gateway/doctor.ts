// What `tollgate doctor` says, line by line, and what is left of what it looked at.
import { readdirSync, readFileSync, statSync } from "node:fs";
import { join } from "node:path";
import { type Environment, runCommand } from "./process.ts";

export interface DoctorLine {
  readonly state: string;
  readonly what: string;
  /** What it found, and what to do about it. */
  readonly text: string;
}

export interface DoctorRun {
  readonly code: number;
  readonly lines: readonly DoctorLine[];
  readonly stdout: string;
  readonly stderr: string;
  /** The lines that are not ok, as `state what: text`. */
  readonly bad: readonly string[];
}

const LINE = /^(ok|warn|fail) +(\S.*?) {2,}(\S.*)$/;

export async function runDoctor(
  args: readonly string[],
  surroundings: { readonly cwd: string; readonly env: Environment; readonly program?: readonly string[] },
): Promise<DoctorRun> {
  const { code, stdout, stderr } = await runCommand(["doctor", ...args], surroundings);
  const lines = stdout
    .split("\n")
    .slice(0, -1)
    .map((line): DoctorLine => {
      const [, state, what, text] = LINE.exec(line) ?? [];
      if (state === undefined || what === undefined || text === undefined) throw new Error(`not a line: ${line}`);
      return { state, what, text };
    });
  const bad = lines.filter(({ state }) => state !== "ok").map(({ state, what, text }) => `${state} ${what}: ${text}`);
  return { code, lines, stdout, stderr, bad };
}

/**
 * Of every file below a directory: its bytes, its mode and when it was changed last. Left out is the index of SQLite's log,
 * memory that its readers share, and that is made anew from the log.
 */
export function snapshot(dir: string): Record<string, string> {
  const names = readdirSync(dir, { recursive: true })
    .map(String)
    .filter((name) => !name.endsWith("-shm"))
    .sort();
  return Object.fromEntries(
    names.map((name) => {
      const path = join(dir, name);
      const { mode, mtimeMs, size } = statSync(path);
      const digest = statSync(path).isFile() ? Bun.hash(readFileSync(path)).toString(36) : "";
      return [name, `${mode.toString(8)} ${mtimeMs} ${size} ${digest}`];
    }),
  );
}
