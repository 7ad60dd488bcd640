// `bun run bench:peers`: the same work done by others, Restate and the official x402 library, in the same run.
import { type Part, runParts } from "../run.ts";
import { calls } from "./calls.ts";
import { settlements, verification } from "./x402.ts";

const PARTS: Readonly<Record<string, Part>> = { calls, verify: verification, settlements };

// At once: the official library would go on asking a chain that is gone for transactions that it has lost.
process.exit(await runParts(PARTS, Bun.argv.slice(2)));
