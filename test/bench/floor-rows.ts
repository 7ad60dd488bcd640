// The floor of accepts on Postgres: the very rows that an accept writes, in the tables that the gateway has with all their
// indexes, by one autocommit statement with `unnest` for all that wait. Nothing is checked, and nothing else is stored.
import { SQL } from "bun";
import { silentLog } from "../../src/core/log.ts";
import { systemClock } from "../../src/core/time.ts";
import { openPostgres } from "../../src/storage/postgres/store.ts";
import { inputRows } from "../../src/storage/store.ts";
import type { FloorCall } from "./floor-store.ts";

const [TENANT, AGENT] = ["bench", "agt_01a2085c-c3cf-74c5-92c1-4680e2c16947"];
const REPLICA = "rep_01a2085c-c353-7401-ae8e-68688939aa81";

const idOf = ({ id }: FloorCall) => `inv_${id}`;

/** As long as the gateway's. */
const callOf = ({ id }: FloorCall) =>
  `{"url":"http://127.0.0.1:37289/","protocol":"http","mcp_protocol_version":null,"credential_ref":null,"capture":true,"receipt":false,"headers":[["content-type","application/json"],["via","1.1 tollgate-7b8b990a1fa72646"]],"request_id":"${id}"}`;

const COLUMNS = {
  id: ["text", idOf],
  tenant: ["text", () => TENANT],
  agent_id: ["text", () => AGENT],
  caller: ["text", () => TENANT],
  mode: ["text", () => "transactional"],
  status: ["text", () => "pending"],
  req_size: ["bigint", ({ body }) => body.byteLength],
  body_captured: ["boolean", () => true],
  outbox: ["text", () => null],
  accepted_by: ["text", () => REPLICA],
  updated_at: ["bigint", () => Date.now()],
  call: ["text", callOf],
  request: ["bytea", ({ body }) => body],
} as const satisfies Parameters<typeof inputRows<FloorCall>>[0];

const INPUT = inputRows<FloorCall>(COLUMNS);
const NAMES = Object.keys(COLUMNS).join(", ");

const STORE = `insert into open_invocations (${NAMES}) select ${NAMES} from ${INPUT.source}`;

/** Writes the rows of calls, and resolves when they are on the disk. */
export async function openFloorRows(url: string) {
  await (await openPostgres({ databaseUrl: url, clock: systemClock, log: silentLog })).close();
  const sql = new SQL(url, { max: 1 });
  return {
    async write(calls: readonly FloorCall[]): Promise<void> {
      if (calls.length > 0) await sql.unsafe(STORE, INPUT.values(calls));
    },
    close: () => sql.close(),
  };
}
