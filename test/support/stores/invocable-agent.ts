// An agent as the path of a call sees it: free, of plain HTTP, without limits.
import type { InvocableAgent } from "../../../src/gateway/agents/store.ts";

export const AGENT: InvocableAgent = {
  id: "agt_019aa4d2-7c1e-7b54-9d0f-3f0b6c1d2e3f",
  upstream_url: "https://example.com/",
  credential_ref: null,
  suspended: false,
  invocation_rate_limit: null,
  invocation_burst: null,
  rate_revision: 0,
  emit_receipts: false,
  capture_body: true,
  protocol: "http",
  mcp_protocol_version: null,
  pricing: null,
  deleted_at: null,
};
