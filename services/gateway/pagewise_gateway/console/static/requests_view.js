// Requests: who runs, who waits, who has ended, and where the time of one of them went.

import { count, num, seconds, short } from "./format.js";
import { Empty, State, Table } from "./parts.js";
import { RequestDetails } from "./request_details.js";
import { go, href } from "./route.js";
import { html, useState } from "./htm-preact.js";

const MOST = 200; // rows of a table

export function RequestsView({ store, params }) {
  const requests = store.requests;
  const lists = [
    ["Running", requests?.running ?? []],
    ["Waiting", requests?.waiting ?? []],
    ["Ended, the newest first", requests?.ended ?? []],
  ];
  return html`
    <${Find} id=${params.id} />
    ${params.id && html`<${RequestDetails} key=${params.id} id=${params.id} live=${liveOf(requests, params.id)} />`}
    ${!requests && html`<div class="panel"><${Empty}>Waiting for the first update.<//></div>`}
    ${requests &&
    lists.map(
      ([title, list]) => html`<section class="panel" key=${title}>
        <h2>${title} <small>${num(list.length)}${requests.truncated && list.length ? ", perhaps more" : ""}</small></h2>
        ${list.length ? html`<${List} label=${title} list=${list} selected=${params.id} />` : html`<${Empty}>None.<//>`}
      </section>`,
    )}
  `;
}

function liveOf(requests, id) {
  const all = [...(requests?.running ?? []), ...(requests?.waiting ?? []), ...(requests?.ended ?? [])];
  const bare = id.replace(/^(chatcmpl|cmpl)-/, "");
  return all.find((each) => each.request_id === bare || each.client_request_id === id);
}

function Find({ id = "" }) {
  const [text, setText] = useState(id);
  const submit = (event) => {
    event.preventDefault();
    go("requests", { id: text.trim() });
  };
  return html`<form class="find" role="search" onSubmit=${submit}>
    <label for="find">Find a request</label>
    <input
      id="find"
      type="search"
      placeholder="id of the response (cmpl-…) or X-Request-Id"
      value=${text}
      onInput=${(event) => setText(event.target.value)}
    />
    <button type="submit">Find</button>
  </form>`;
}

const HEAD = ["Request", "Status", "Executor", "Prompt", "From cache", "Output", "Blocks", "Shared", "Queue", "First token", "Age"];

function List({ label, list, selected }) {
  const keys = list.some(({ key }) => key);
  return html`<${Table} label=${label} head=${keys ? [...HEAD, "Key"] : HEAD}>
      ${list.slice(0, MOST).map(
        (each) => html`<tr key=${each.request_id} class=${each.request_id === selected ? "selected" : ""}>
          <th scope="row">
            <a class="code" href=${href("requests", { id: each.request_id })}>${short(each.client_request_id || each.request_id)}</a>
          </th>
          <td>
            <${State} value=${each.finish_reason ? `ended: ${each.finish_reason}` : each.status} />
            ${each.preemptions > 0 && html` <small>preempted ${num(each.preemptions)}×</small>`}
          </td>
          <td>${each.executor_id || "–"}${each.moved_from && html` <small>moved from ${each.moved_from}</small>`}</td>
          <td>${prefill(each)}</td>
          <td>${num(each.num_cached_tokens)}</td>
          <td>${num(each.output_tokens)}</td>
          <td>${num(each.blocks)}</td>
          <td>${num(each.shared_blocks)}</td>
          <td>${seconds(each.queue_seconds)}</td>
          <td>${seconds(each.first_token_seconds)}</td>
          <td>${seconds(each.arrived_seconds_ago)}</td>
          ${keys && html`<td>${each.key}</td>`}
        </tr>`,
      )}
    <//>
    ${list.length > MOST && html`<p class="empty">${count(list.length - MOST, "more request")} are not listed. Find them by id.</p>`}`;
}

function prefill({ prompt_tokens: prompt, computed_tokens: computed, output_tokens: output, finish_reason: ended }) {
  return !ended && !output && computed < prompt ? `${num(computed)} of ${num(prompt)}` : num(prompt);
}
