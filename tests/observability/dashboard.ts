// What dashboard.json has to be, by Grafana's own types. test_dashboard_types.py adds the dashboard as constants of these types.
import { Dashboard, Panel, RowPanel } from '@grafana/schema';
import { Options as GaugeOptions } from '@grafana/schema/dist/esm/raw/composable/gauge/panelcfg/x/GaugePanelCfg_types.gen';
import { PrometheusDataQuery } from '@grafana/schema/dist/esm/raw/composable/prometheus/dataquery/x/PrometheusDataQuery_types.gen';
import { Options as StatOptions } from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import {
  FieldConfig as TimeSeriesFields,
  Options as TimeSeriesOptions,
} from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';

// A type as JSON has it: an enumeration is one of its strings; the first threshold's value is -Infinity, for which JSON has null.
type Json<T> =
  T extends string ? (string extends T ? string : `${T}`)
  : T extends number | boolean | null | undefined ? T
  : T extends Array<infer Item> ? Array<Json<Item>>
  : unknown extends T ? unknown
  : { [Key in keyof T]: Key extends 'value' ? Json<T[Key]> | null : Json<T[Key]> };
type Parts<T> = { [Key in keyof T]?: Partial<T[Key]> }; // Grafana fills in the defaults of the others
type Fields = Json<NonNullable<Panel['fieldConfig']>>;

interface PanelOf<Options, Custom> extends Omit<Json<Panel>, 'options' | 'targets' | 'fieldConfig'> {
  options: Parts<Json<Options>>;
  targets: Array<Json<PrometheusDataQuery>>;
  fieldConfig: Omit<Fields, 'defaults'> & { defaults: Omit<Fields['defaults'], 'custom'> & { custom?: Json<Custom> } };
}
type Variable = NonNullable<NonNullable<Dashboard['templating']>['list']>[number] & { definition?: string }; // Grafana writes it, too
type Top = Json<Omit<Dashboard, 'panels' | 'templating'>> & { templating: { list: Array<Json<Variable>> } };
interface PanelTypes {
  row: Json<RowPanel>;
  timeseries: PanelOf<TimeSeriesOptions, TimeSeriesFields>;
  stat: PanelOf<StatOptions, never>;
  gauge: PanelOf<GaugeOptions, never>;
}
