// `bun run bench`: what this does beside what else could do it, in the same run, so that the ratios mean something
// on any machine. Arguments: the names of parts, all of them without any, and the seconds that each load takes.
// Nothing here can fail for being slow.
import { accepts } from "./accepts.ts";
import { history } from "./history.ts";
import { paidCalls } from "./paid.ts";
import { say } from "./report.ts";
import { settlements } from "./settlements.ts";
import { streams } from "./streams.ts";
import { verification } from "./verify.ts";

const SECONDS = 6;

const PARTS: Readonly<Record<string, (seconds: number) => Promise<void>>> = {
  accepts,
  streams,
  history,
  verify: verification,
  settlements,
  paid: paidCalls,
};

async function main(args: readonly string[]): Promise<number> {
  const names = args.filter((arg) => !/^\d+$/.test(arg));
  const seconds = Number(args.find((arg) => !names.includes(arg)) ?? SECONDS);
  const unknown = names.find((name) => !Object.hasOwn(PARTS, name));
  if (unknown !== undefined) {
    say(`no part ${unknown}; there are: ${Object.keys(PARTS).join(", ")}`);
    return 2;
  }
  say(`${navigator.hardwareConcurrency} cores, Bun ${Bun.version}`);
  for (const [name, part] of Object.entries(PARTS)) {
    if (names.length === 0 || names.includes(name)) await part(seconds);
  }
  return 0;
}

// At once: the official library would go on asking a chain that is gone for transactions that it has lost.
process.exit(await main(Bun.argv.slice(2)));
