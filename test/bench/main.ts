// `bun run bench`: what this does beside what else could do it, in the same run, so that the ratios mean something
// on any machine.
import { acceptedCalls, recordedCalls } from "./accepts.ts";
import { databasePart } from "./database-part.ts";
import { gas } from "./gas.ts";
import { history } from "./history.ts";
import { paidCalls } from "./paid.ts";
import { type Part, runParts } from "./run.ts";
import { settlements } from "./settlements.ts";
import { starts } from "./starts.ts";
import { streams } from "./streams.ts";
import { manyTenants } from "./tenants.ts";
import { verification } from "./verify.ts";

const PARTS: Readonly<Record<string, Part>> = {
  accepts: acceptedCalls,
  calls: recordedCalls,
  database: databasePart,
  tenants: manyTenants,
  history,
  verify: verification,
  gas,
  settlements,
  paid: paidCalls,
  streams,
  start: starts,
};

process.exit(await runParts(PARTS, Bun.argv.slice(2)));
