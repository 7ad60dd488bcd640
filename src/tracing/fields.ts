// What a span says, in the words of OpenTelemetry's semantic conventions.
import type { Attributes } from "@opentelemetry/api";
import {
  ATTR_ERROR_TYPE,
  ATTR_HTTP_REQUEST_METHOD,
  ATTR_HTTP_RESPONSE_STATUS_CODE,
  ATTR_HTTP_ROUTE,
  ATTR_SERVER_ADDRESS,
} from "@opentelemetry/semantic-conventions";
import type { SpanFields } from "../core/tracing.ts";

const NAMES: Readonly<Record<keyof SpanFields, string>> = {
  method: ATTR_HTTP_REQUEST_METHOD,
  status: ATTR_HTTP_RESPONSE_STATUS_CODE,
  route: ATTR_HTTP_ROUTE,
  host: ATTR_SERVER_ADDRESS,
  errorType: ATTR_ERROR_TYPE,
  // Not stable there yet, so they are not among its constants.
  rpcMethod: "rpc.method",
  rpcEndpoint: "tollgate.rpc.endpoint",
  tenant: "tollgate.tenant",
  account: "tollgate.account",
  agentId: "tollgate.agent.id",
  invocationId: "tollgate.invocation.id",
  attempt: "tollgate.settlement.attempt",
  outcome: "tollgate.settlement.outcome",
};

export function attributesOf(fields: SpanFields): Attributes {
  const attributes: Attributes = {};
  for (const field in fields) {
    const name = field as keyof SpanFields;
    const value = fields[name];
    if (value !== undefined) attributes[NAMES[name]] = value;
  }
  return attributes;
}
