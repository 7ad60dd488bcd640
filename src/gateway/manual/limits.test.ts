import { expect, test } from "bun:test";
import { join } from "node:path";
import { ALLOWED_HOSTS_MAX, URL_CHARACTERS_MAX } from "../../core/host.ts";
import * as limits from "../../kernel/limits.ts";

const page = await Bun.file(join(import.meta.dir, "security.md")).text();

const MIB = 1024 * 1024;
const count = (value: number) => value.toLocaleString("en-US");
const seconds = (ms: number) => `${ms / 1000} s`;

/** Names of rows, each with what its limit must hold. */
const ROWS: [name: string, ...parts: string[]][] = [
  ["body of a proxy call", `${limits.PROXY_BODY_BYTES_MAX / MIB} MiB`],
  ["body of any other request", `${limits.MANAGEMENT_BODY_BYTES_MAX / MIB} MiB`],
  ["bodies above 4 KiB that are coming in", `${limits.BODY_INTAKE_BYTES_MAX / MIB} MiB`],
  ["time for a body to come in", seconds(limits.BODY_INTAKE_MS_MAX), seconds(limits.BODY_INTAKE_SILENCE_MS_MAX)],
  [
    "rest of a body that nobody needs, dropped before the connection closes",
    `${limits.PASSED_OVER_BYTES_MAX / MIB} MiB`,
    seconds(limits.PASSED_OVER_MS_MAX),
    seconds(limits.PASSED_OVER_SILENCE_MS_MAX),
    count(limits.PASSED_OVER_COUNT_MAX),
    `in chunks ${seconds(limits.PASSED_OVER_CHUNKED_SILENCE_MS_MAX)} and ${count(limits.PASSED_OVER_CHUNKED_MAX)}`,
  ],
  ["bodies in chunks (`Transfer-Encoding`) that are coming in", count(limits.CHUNKED_BODIES_MAX)],
  ["`X-Service-Model`", count(limits.SERVICE_MODEL_BYTES_MAX)],
  ["`Idempotency-Key`", count(limits.IDEMPOTENCY_KEY_CHARACTERS_MAX)],
  ["`X-Request-ID`", count(limits.REQUEST_ID_CHARACTERS_MAX)],
  ["depth of JSON", count(limits.JSON_DEPTH_MAX)],
  [
    "JSON that is no call",
    count(limits.JSON_KEYS_MAX),
    count(limits.JSON_ITEMS_MAX),
    count(limits.JSON_FREE_VALUES_MAX),
  ],
  ["JSON-RPC batch", count(limits.BATCH_MESSAGES_MAX)],
  ["page of a list", count(limits.PAGE_LIMIT_MAX)],
  [
    "answers above 16 KiB that their callers have not taken",
    `${limits.ANSWER_BYTES_MAX / MIB} MiB`,
    seconds(limits.ANSWER_WAIT_MS_MAX),
  ],
  ["captured body", `${limits.CAPTURE_BYTES_MAX / MIB} MiB`],
  ["name", count(limits.NAME_CHARACTERS_MAX)],
  ["description", count(limits.DESCRIPTION_CHARACTERS_MAX)],
  ["tags", `${limits.TAGS_MAX} of ${limits.TAG_CHARACTERS_MAX}`],
  ["metadata", `${limits.METADATA_BYTES_MAX / 1024} KiB`],
  ["URL", count(URL_CHARACTERS_MAX)],
  ["secret", count(limits.PLAINTEXT_BYTES_MAX)],
  ["reference to a secret", count(limits.VAULT_REF_CHARACTERS_MAX)],
  ["`allowed_hosts`", count(ALLOWED_HOSTS_MAX)],
  ["rules of a policy", count(limits.POLICY_RULES_MAX)],
  ["list in a rule", count(limits.POLICY_LIST_MAX), count(limits.POLICY_ENTRY_CHARACTERS_MAX)],
  ["payment header", count(limits.PAYMENT_HEADER_CHARACTERS_MAX)],
  ["signature of a payment", count(limits.SIGNATURE_BYTES_MAX)],
  ["body of `/settle`", `${limits.SETTLE_BODY_BYTES_MAX / 1024} KiB`],
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
