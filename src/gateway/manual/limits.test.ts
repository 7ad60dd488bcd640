import { expect, test } from "bun:test";
import { join } from "node:path";
import { ALLOWED_HOSTS_MAX, URL_CHARACTERS_MAX } from "../../core/host.ts";
import { MAX } from "../../kernel/limits.ts";

const page = await Bun.file(join(import.meta.dir, "security.md")).text();

const MIB = 1024 * 1024;
const count = (value: number) => value.toLocaleString("en-US");
const seconds = (ms: number) => `${ms / 1000} s`;

/** Names of rows, each with what its limit must hold. */
const ROWS: [name: string, ...parts: string[]][] = [
  ["body of a proxy call", `${MAX.bodyBytes / MIB} MiB`],
  ["body of any other request", `${MAX.managementBodyBytes / MIB} MiB`],
  ["bodies above 4 KiB that are coming in", `${MAX.bodyIntakeBytes / MIB} MiB`],
  ["time for a body to come in", seconds(MAX.bodyMs), seconds(MAX.bodySilenceMs)],
  [
    "rest of a body that nobody needs, dropped before the connection closes",
    `${MAX.drainedBytes / MIB} MiB`,
    seconds(MAX.drainedMs),
    seconds(MAX.drainedSilenceMs),
    count(MAX.drained),
  ],
  ["`X-Service-Model`", count(MAX.serviceModelBytes)],
  ["`Idempotency-Key`", count(MAX.idempotencyKeyCharacters)],
  ["`X-Request-ID`", count(MAX.requestIdCharacters)],
  ["depth of JSON", count(MAX.jsonDepth)],
  ["JSON that is no call", count(MAX.jsonKeys), count(MAX.jsonItems), count(MAX.jsonFreeValues)],
  ["JSON-RPC batch", count(MAX.batchMessages)],
  ["page of a list", count(MAX.pageItems)],
  [
    "answers above 16 KiB that their callers have not taken",
    `${MAX.responseBytes / MIB} MiB`,
    seconds(MAX.responseWaitMs),
  ],
  ["captured body", `${MAX.capturedBytes / MIB} MiB`],
  ["name", count(MAX.nameCharacters)],
  ["description", count(MAX.descriptionCharacters)],
  ["tags", `${MAX.tags} of ${MAX.tagCharacters}`],
  ["metadata", `${MAX.metadataBytes / 1024} KiB`],
  ["URL", count(URL_CHARACTERS_MAX)],
  ["secret", count(MAX.plaintextBytes)],
  ["reference to a secret", count(MAX.vaultRefCharacters)],
  ["`allowed_hosts`", count(ALLOWED_HOSTS_MAX)],
  ["rules of a policy", count(MAX.policyRules)],
  ["list in a rule", count(MAX.policyList), count(MAX.policyEntryCharacters)],
  ["payment header", count(MAX.paymentHeaderCharacters)],
  ["signature of a payment", count(MAX.signatureBytes)],
  ["body of `/settle`", `${MAX.settleBodyBytes / 1024} KiB`],
];

test("the limits that the manual shows are those of the code", () => {
  const shown = new Map(
    [...page.matchAll(/^\| (.+?) \| (.+) \|$/gm)].map(([, name = "", limit = ""]) => [name, limit]),
  );
  for (const [name, ...parts] of ROWS) {
    const limit = shown.get(name) ?? "no such row";
    expect([name, parts.filter((part) => !limit.includes(part))]).toEqual([name, []]);
  }
});
