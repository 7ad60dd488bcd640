// README.md and the pages of the manual as data: its fenced blocks, the exchanges of its `http` blocks, its links, tables and headings. And
// the shells in which its commands run, each a process group that goes when the test process goes.
import { type ChildProcess, spawn } from "node:child_process";
import { join } from "node:path";

const ROOT = join(import.meta.dir, "..", "..");

export interface Block {
  /** What follows the opening fence, such as `sh tour`. */
  readonly info: string;
  readonly text: string;
}

export interface Readme {
  readonly text: string;
  readonly blocks: readonly Block[];
  /** The text below a heading, up to the next heading of its level or a higher one. */
  section(heading: string): string;
  /** The anchors that its headings make. */
  readonly anchors: ReadonlySet<string>;
  /** Targets of its links. */
  readonly links: readonly string[];
}

const FENCED = /^```(.*)\n([\s\S]*?)^```$/gm;

export function parseReadme(text: string): Readme {
  const prose = text.replace(FENCED, "");
  const headings = [...prose.matchAll(/^#+ (.+)$/gm)].map(([, heading = ""]) => heading);
  return {
    text,
    blocks: [...text.matchAll(FENCED)].map(([, info = "", body = ""]) => ({ info, text: body })),
    section(heading) {
      const level = new RegExp(`^(#+) ${RegExp.escape(heading)}\\n`, "m").exec(text);
      if (level === null) throw new Error(`there is no section ${heading}`);
      const start = level.index + level[0].length;
      const end = text.slice(start).search(new RegExp(`^#{1,${level[1]?.length}} `, "m"));
      return text.slice(start, end === -1 ? text.length : start + end);
    },
    anchors: new Set(
      headings.map((heading) =>
        heading
          .toLowerCase()
          .replace(/[^\w\- ]/g, "")
          .replaceAll(" ", "-"),
      ),
    ),
    links: [...prose.matchAll(/\]\(([^)\s]+)\)/g)].map(([, target = ""]) => target),
  };
}

/** The cells of the rows of a Markdown table, less its head. */
export function tableRows(section: string, head: string): string[][] {
  const start = section.indexOf(`${head}\n`);
  if (start === -1) throw new Error(`there is no table ${head}`);
  const [, , ...lines] = section.slice(start).split("\n");
  const rows = lines.slice(
    0,
    lines.findIndex((line) => !line.startsWith("|")),
  );
  return rows.map((line) =>
    line
      .slice(1, -1)
      .split(/(?<!\\)\|/)
      .map((cell) => cell.trim()),
  );
}

/** A request and the answer that is shown for it. */
export interface Exchange {
  readonly method: string;
  readonly path: string;
  readonly headers: Readonly<Record<string, string>>;
  readonly body: string | null;
  readonly status: number;
  readonly answerHeaders: Readonly<Record<string, string>>;
  /** The shown part of the answer's body, as JSON text. */
  readonly answer: string | null;
}

const EXCHANGE = /^([A-Z]+) (\/\S*)\n([\s\S]*?)^→ (\d{3})[ \n]?([\s\S]*)$/m;

/** The exchanges of an `http` block, which stand apart by an empty line. */
export function exchanges(block: string): Exchange[] {
  return block.split(/\n\n/).map((text) => {
    const [whole, method = "", path = "", request = "", status, rest = ""] = EXCHANGE.exec(text) ?? [];
    if (whole === undefined) throw new Error(`no exchange:\n${text}`);
    const [sent, answered] = [headersAndBody(request), headersAndBody(rest)];
    return {
      method,
      path,
      headers: sent.headers,
      body: sent.body,
      status: Number(status),
      answerHeaders: answered.headers,
      answer: answered.body,
    };
  });
}

function headersAndBody(text: string) {
  const start = text.search(/^\{/m);
  const head = start === -1 ? text : text.slice(0, start);
  const lines = head.split("\n").filter((line) => line !== "");
  const headers = lines.map((line): [string, string] => {
    const colon = line.indexOf(": ");
    return [line.slice(0, colon), line.slice(colon + 2)];
  });
  return { headers: Object.fromEntries(headers), body: start === -1 ? null : text.slice(start).trimEnd() };
}

export interface Shell extends AsyncDisposable {
  /** What it has printed so far, to standard output and error. */
  printed(): string;
  /** Resolves once it has printed something that fits; rejects when it ends before, or after `ms`. */
  prints(pattern: RegExp, ms: number): Promise<void>;
  /** Standard output, once it has ended. */
  readonly output: Promise<string>;
}

/** In the background of the shell, which is the leader of its group: ends the group when the test is gone. */
const GUARD = '( while kill -0 "$GUARDED"; do sleep 1; done; rm -rf "$REMOVED"; kill -9 0 ) 2>/dev/null >&2 &\n';

/** @param removed a directory that goes too when the test process is killed */
export function runShell(script: string, env: Readonly<Record<string, string>>, removed: string): Shell {
  const child: ChildProcess = spawn("sh", ["-c", GUARD + script], {
    cwd: ROOT,
    env: { ...env, GUARDED: String(process.pid), REMOVED: removed },
    detached: true,
    stdio: ["ignore", "pipe", "pipe"],
  });
  const chunks = { out: [] as string[], all: [] as string[] };
  const watches = new Set<() => void>();
  const take = (into: string[][]) => (chunk: Buffer) => {
    for (const list of into) list.push(chunk.toString());
    for (const watch of watches) watch();
  };
  child.stdout?.on("data", take([chunks.out, chunks.all]));
  child.stderr?.on("data", take([chunks.all]));
  // Not "close": the guard holds the pipes' other ends no longer, but what the script left behind may.
  const { promise: ended, resolve: end } = Promise.withResolvers<void>();
  child.on("exit", () => end());
  const printed = () => chunks.all.join("");
  return {
    printed,
    output: ended.then(() => chunks.out.join("")),
    prints(pattern, ms) {
      const { promise, resolve, reject } = Promise.withResolvers<void>();
      const look = () => void (pattern.test(printed()) && resolve());
      const fail = () => reject(new Error(`it did not print ${pattern}:\n${printed()}`));
      watches.add(look);
      look();
      const timer = setTimeout(fail, ms);
      ended.then(fail);
      return promise.finally(() => {
        clearTimeout(timer);
        watches.delete(look);
      });
    },
    async [Symbol.asyncDispose]() {
      try {
        process.kill(-Number(child.pid), "SIGKILL");
      } catch {
        // The whole group has ended already.
      }
      await ended;
    },
  };
}
