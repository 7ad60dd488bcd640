// What a call needs of its agent, read for many calls at once: after a second each of a thousand busy agents is read
// again, which as a query each took more of the gateway and of Postgres than all else about an accept (measured).
import type { Protocol } from "../../core/states.ts";
import { type Command, inputRows } from "../../storage/store.ts";

/** Everything but the catalog's texts. */
export interface InvocableAgent {
  readonly id: string;
  readonly upstream_url: string | null;
  readonly credential_ref: string | null;
  readonly suspended: boolean;
  readonly invocation_rate_limit: number | null;
  readonly invocation_burst: number | null;
  readonly rate_revision: number;
  readonly emit_receipts: boolean;
  readonly capture_body: boolean;
  readonly protocol: Protocol;
  readonly mcp_protocol_version: string | null;
  /** In its stored form. */
  readonly pricing: string | null;
  readonly deleted_at: number | null;
}

export interface AgentKey {
  readonly tenant: string;
  readonly id: string;
}

const SELECTED = `a.id, a.upstream_url, a.credential_ref, a.suspended, a.invocation_rate_limit, a.invocation_burst,
  a.rate_revision, a.emit_receipts, a.capture_body, a.protocol, a.mcp_protocol_version, a.pricing, a.deleted_at`;

const INPUT = inputRows<AgentKey>({ tenant: ["text", ({ tenant }) => tenant], id: ["text", ({ id }) => id] });

/** Each database has numbers and flags in forms of its own. */
function agentOf(row: Readonly<Record<string, unknown>>): InvocableAgent {
  const { n: _place, ...fields } = row;
  const whole = (name: string) => (row[name] === null ? null : Number(row[name]));
  return {
    ...(fields as unknown as InvocableAgent),
    suspended: Boolean(row["suspended"]),
    invocation_rate_limit: whole("invocation_rate_limit"),
    invocation_burst: whole("invocation_burst"),
    rate_revision: Number(row["rate_revision"]),
    emit_receipts: Boolean(row["emit_receipts"]),
    capture_body: Boolean(row["capture_body"]),
    deleted_at: whole("deleted_at"),
  };
}

/** Null when the tenant has no agent with this ID. */
export const agentLookUp: Command<AgentKey, InvocableAgent | null> = {
  name: "agent",
  kind: "look_up",
  tenantOf: ({ tenant }) => tenant,
  bytesOf: () => 128,
  sqlite(prepare) {
    const find = prepare(`select ${SELECTED} from agents a where a.tenant = ? and a.id = ?`);
    return ({ tenant, id }) => {
      const row = find.get(tenant, id);
      return row === null ? null : agentOf(row);
    };
  },
  postgres: {
    text: `select input.n, ${SELECTED} from ${INPUT.source}, agents a where a.tenant = input.tenant and a.id = input.id`,
    valuesOf: INPUT.values,
    outputsOf(inputs, rows) {
      const found: (InvocableAgent | null)[] = inputs.map(() => null);
      for (const row of rows) found[Number(row["n"]) - 1] = agentOf(row);
      return found;
    },
  },
};
